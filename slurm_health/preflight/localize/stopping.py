# SPDX-License-Identifier: Apache-2.0
"""Whether another round is worth its time, and for whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from statistics import NormalDist

import numpy as np

from slurm_health.preflight.localize.evidence import Bearing, RoundLedger, Trial
from slurm_health.preflight.localize.findings import Conclusions, lone_pairs
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.pairing import Pair
from slurm_health.preflight.localize.settings import SMALL_RUN, LocalizeSettings

_SUSPICIOUS = 0.1  # a node that is bad with a smaller probability than this is left alone
_SUSPICIOUS_OF_FEW = 0.05  # the same where the prior alone comes close to that
# What a node does alone nobody else can disturb: one test of it says more than one of a pair.
_SUSPICIOUS_ALONE = 0.3
_KNOWN_TROUBLE = 0.05  # a prior above this makes a node a suspect before the first round
_GIVE_UP_ON_SILENCE = 2  # rounds without an answer: the third would only cost another deadline
_SUSPECT_FABRIC = 0.5  # the same for leaves and paths, which many tests touch
_SURE = 1e-6  # probability of error below which a conviction needs no more tests
# After which nothing changes any more if everybody's processes have crashed: no crash convicts
# then, and two in a row are told from one that passed.
_CRASHING_ROUNDS = 2
_PATIENCE = 4  # rounds after which a slowdown that looks tolerable is not pursued
# Deviations of the middle half of the tests. A few odd tests of a small run may be noise or slow
# nodes: what repeats is told from what does not by another round, not by what is likelier. Several
# that lie less far out are as odd where noise brings about so many in one run of a hundred.
_ODD, _ODD_TOGETHER, _BY_CHANCE = 3.0, (2.5, 2.0, 1.5), 0.01
_NORMAL = NormalDist()
_CONTROL_FAILURES = 2  # a pair that fails so often is no control: its own path is bad
_ACROSS_LEAVES = 2  # rounds: the first pairs nodes inside their leaves, the second across them
# A second round of pairs, where one would do, is cheap among so few nodes if the first took less.
# Of more nodes as many as there are pairs would have to be equally slow; of three all meet anyhow.
_CHEAP_ROUND_S, _CHEAP_NODES, _TWICE = 2.0, range(4, 9), 2
_PAIR_ROUNDS = 3  # how many rounds beyond the least a doubtful pair may cost


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the next round is for; sequences are by node number.

    `shared_only`: nothing is in doubt, and it costs little to have other partners meet.
    """

    another_round: bool
    shared_only: bool
    active: tuple[int, ...]
    undecided: frozenset[int]
    trusted: frozenset[int]
    risk: tuple[float, ...]
    byes: tuple[int, ...]
    repeats: tuple[Pair, ...]
    tested_in_leaf: frozenset[int]
    suspect_leaves: frozenset[int]


def needs_of(
    ledger: RoundLedger,
    findings: Conclusions,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> Needs:
    """Return whether and for whom another round is needed."""
    nodes = range(len(ledger.names))
    begun = len(ledger.rounds)
    together = findings.suspicion.wanted
    active = tuple(node for node in nodes if not _out(findings, node))
    risk = tuple(max(float(findings.risk[node]), prior.get(node, 0.0) / 100) for node in nodes)
    trusted = frozenset(node for node in active if findings.trusted(node))
    odd = _odd_nodes(findings, begun, settings)
    if begun:
        undecided = frozenset(
            node
            for node in active
            if node in findings.guilty or node in odd or _open(findings, node, begun, settings)
        )
    else:
        risk = tuple(prior.get(node, 0.0) for node in nodes)
        undecided = frozenset(node for node in active if risk[node] > _KNOWN_TROUBLE)
        trusted = frozenset(set(active) - undecided) if undecided else trusted
    doubtful = [pair for pair in lone_pairs(findings) if pair.unproven]
    costly = any(pair.striking for pair in doubtful) and begun < settings.min_rounds + _PAIR_ROUNDS
    useful = any(
        _testable(ledger, findings, node, active, trusted)
        for node in undecided - findings.guilty.keys()
    )
    least = _least_rounds(ledger, findings, settings)
    control = _control(findings, active)
    doubt = bool(useful or costly or control or together or _fabric_open(findings))
    enough = begun >= least and not doubt
    witnesses = _only_witnesses(ledger, findings, active)
    repeats = (*control, *together, *(pair.nodes for pair in doubtful), *witnesses)
    return Needs(
        another_round=not (enough or _is_over(ledger, findings, active, odd, settings)),
        shared_only=not (doubt or undecided) and begun >= _asked_rounds(findings, settings),
        active=_to_be_tested(findings, active, undecided, settings),
        undecided=undecided,
        trusted=trusted,
        risk=risk,
        byes=_byes(ledger),
        repeats=tuple(pair for pair in repeats if set(pair) <= set(active)),
        tested_in_leaf=_tested_in_leaf(findings),
        suspect_leaves=_suspect_leaves(findings),
    )


def _is_over(
    ledger: RoundLedger,
    findings: Conclusions,
    active: Sequence[int],
    odd: Collection[int],
    settings: LocalizeSettings,
) -> bool:
    """Tell whether no round may follow, or none would tell more, whatever is in doubt."""
    begun = len(ledger.rounds)
    if begun >= settings.round_limit(len(ledger.names)) or not active:
        return True
    # All processes crash: that is the software, and one more round will not mend it.
    if begun >= _CRASHING_ROUNDS and len(findings.crashes) == len(ledger.names):
        return True
    alone = len(active) == 1 and not odd
    return alone and not _solo_useful(findings, active[0], begun, settings)


def _to_be_tested(
    findings: Conclusions,
    active: tuple[int, ...],
    undecided: frozenset[int],
    settings: LocalizeSettings,
) -> tuple[int, ...]:
    """Return who takes part in the next round.

    Whether a process that crashed alone crashes again, the others need not be measured again for:
    there is nothing to compare.
    """
    again = undecided and undecided <= findings.crashes.keys()
    return tuple(sorted(undecided)) if settings.alone and again else active


def _out(findings: Conclusions, node: int) -> bool:
    """Tell whether a node is not tested any more: surely convicted, or given up on.

    Whoever is slow by a narrow margin is tested on, as long as there are rounds for others: so
    the sum of all margins stays small, and another suspect can be convicted beside it.
    """
    guilt = findings.guilty.get(node, ())
    sure = any(g.metric is None or 1 - g.probability < _SURE for g in guilt)
    return sure or len(findings.silences.get(node, ())) >= _GIVE_UP_ON_SILENCE


def _open(findings: Conclusions, node: int, begun: int, settings: LocalizeSettings) -> bool:
    """Tell whether it matters to know more about a node."""
    few = findings.sources.nodes < SMALL_RUN
    limit = _SUSPICIOUS_OF_FEW if few else _SUSPICIOUS
    if settings.alone:
        if node in findings.crashes:
            return True  # it may crash now and then, and a round alone costs little
        limit = _SUSPICIOUS_ALONE
    if node not in findings.tested or findings.bad[node] >= limit:
        return True
    return any(
        metric.found.beyond[node] >= limit
        and (begun < _PATIENCE or metric.found.effect[node] >= np.log1p(metric.floor))
        for metric in findings.metrics
    )


def _odd_nodes(findings: Conclusions, begun: int, settings: LocalizeSettings) -> frozenset[int]:
    """Return the nodes that are odd in any metric, none in a small run or one that went on long."""
    if findings.sources.nodes < SMALL_RUN or begun >= _PATIENCE:
        return frozenset()
    return frozenset().union(*(_odd_in(metric, settings) for metric in findings.metrics))


def _odd_in(metric: MetricEvidence, settings: LocalizeSettings) -> frozenset[int]:
    """Return the nodes of which even the fastest test lies outside what most tests scatter by.

    Noise averages out with the number of its tests. What devices differ by for good raises the
    floor, but one test of each does not show what that is: then the floor counts as asked for.
    """
    nodes, fastest, tests = metric.fastest
    noise = metric.middle_noise / np.sqrt(tests)
    floors = np.where(metric.shared | (tests > 1), metric.floor, settings.compute_floor)
    odd: set[int] = set(nodes[fastest > np.maximum(np.log1p(floors), _ODD * noise)].tolist())
    together = 2 if metric.shared else 1  # nodes of a pair are odd or well in the same tests
    for deviations in _ODD_TOGETHER:
        levels = np.maximum(np.log1p(floors), deviations * noise)
        out = nodes[fastest > levels]
        share = float(np.mean([_NORMAL.cdf(-each) for each in (levels / noise).tolist()]))
        if chance_of_so_many(len(out) // together, len(nodes) // together, share) <= _BY_CHANCE:
            odd.update(out.tolist())
    return frozenset(odd)


def chance_of_so_many(found: int, tests: int, share: float) -> float:
    """Return the probability of at least `found` among `tests`, each with the probability `share`.

    That is the upper tail of the binomial distribution.
    """
    if found <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    fewer = (
        math.lgamma(tests + 1)
        - math.lgamma(each + 1)
        - math.lgamma(tests - each + 1)
        + each * math.log(share)
        + (tests - each) * math.log1p(-share)
        for each in range(found)
    )
    return max(0.0, 1.0 - sum(map(math.exp, fewer)))


def _testable(
    ledger: RoundLedger,
    findings: Conclusions,
    node: int,
    active: tuple[int, ...],
    trusted: frozenset[int],
) -> bool:
    """Tell whether another test can change what is known about an open node.

    Where nobody is trusted only somebody new can help, unless the node is slow, crashed or has
    not been tested at all: then any partner does.
    """
    others = [other for other in active if other != node]
    if any(other not in ledger.met[node] for other in others):
        return True
    if not others:
        return False
    failing = findings.bad[node] >= _SUSPICIOUS and node not in findings.crashes
    if not failing or any(other in trusted for other in others):
        return True
    return node in findings.passed and any(other in findings.passed for other in others)


def _fabric_open(findings: Conclusions) -> bool:
    """Tell whether a leaf or a path is suspected and not yet convicted."""
    first = findings.sources.nodes
    suspected = np.flatnonzero(findings.risk[first:] >= _SUSPECT_FABRIC) + first
    return any(int(variable) not in findings.guilty for variable in suspected)


def _only_witnesses(
    ledger: RoundLedger, findings: Conclusions, active: tuple[int, ...]
) -> tuple[Pair, ...]:
    """Return the pairs that passed, if everybody met everybody and nobody is trusted yet."""
    everybody = set(active)
    if any(findings.trusted(node) or everybody - ledger.met[node] - {node} for node in active):
        return ()
    pairs = dict.fromkeys(
        (trial.nodes[0], trial.nodes[1])
        for trial in findings.trials
        if trial.bearing is Bearing.PASSED and len(trial.nodes) == 2
        if all(findings.bad[node] < _SUSPECT_FABRIC for node in trial.nodes)
    )
    return tuple(pairs) if len(findings.trials) > len(pairs) else ()


def _control(findings: Conclusions, active: tuple[int, ...]) -> tuple[Pair, ...]:
    """Return two nodes to be tested as a control, if nothing shows how fast others are.

    So it is where a node cannot be convicted without one, and where it was in every test there is:
    all of them are then as slow as that node.
    """
    judged = findings.uncontrolled | _in_every_test(findings)
    others = [node for node in active if node in findings.passed and node not in judged]
    others.sort(key=lambda node: findings.risk[node])
    if not judged:
        return ()
    failures = Counter(t.nodes for t in findings.trials if t.bearing is Bearing.FAILED)
    pairs = ((min(pair), max(pair)) for pair in combinations(others, 2))
    return tuple(islice((pair for pair in pairs if failures[pair] < _CONTROL_FAILURES), 1))


def _in_every_test(findings: Conclusions) -> frozenset[int]:
    """Return the nodes that took part in all tests of something that groups do together."""
    return frozenset(
        int(node)
        for metric in findings.metrics
        if metric.shared
        for node in metric.data.sources[0]
        if 0 <= node < findings.sources.nodes
        if (metric.data.sources == node).any(axis=1).all()
    )


def _suspect_leaves(findings: Conclusions) -> frozenset[int]:
    first = findings.sources.nodes
    risk = findings.risk[first : first + findings.sources.leaves]
    return frozenset(int(leaf) for leaf in np.flatnonzero(risk >= _SUSPECT_FABRIC))


def _solo_useful(findings: Conclusions, node: int, begun: int, settings: LocalizeSettings) -> bool:
    """Tell whether a node without any partner should be tested alone once more."""
    return node not in findings.tested or begun == 0 or _open(findings, node, begun, settings)


def _byes(ledger: RoundLedger) -> tuple[int, ...]:
    """Return how often each node sat out."""
    byes = [len(ledger.rounds)] * len(ledger.names)
    number = {name: index for index, name in enumerate(ledger.names)}
    for round_ in ledger.rounds:
        for group in round_.groups:
            for name in group:
                byes[number[name]] -= 1
    return tuple(byes)


def _tested_in_leaf(findings: Conclusions) -> frozenset[int]:
    """Return the nodes that were tested with another node of their own leaf."""
    return frozenset(
        node
        for trial in findings.trials
        if trial.bearing is Bearing.PASSED and _same_leaf(findings, trial)
        for node in trial.nodes
    )


def _same_leaf(findings: Conclusions, trial: Trial) -> bool:
    leaves = {findings.fabric.leaf[node] for node in trial.nodes}
    return len(leaves) == 1 and -1 not in leaves


def cheap_to_repeat(ledger: RoundLedger, findings: Conclusions) -> bool:
    """Tell whether a second round of pairs costs little, and may show what one of them hides.

    Two equally slow nodes in different pairs look healthy. A pair that is slow against what is
    known of it is in doubt by that; where nothing is known, only other pairs can tell.
    """
    if len(ledger.names) not in _CHEAP_NODES or findings.expected_of_pairs or not ledger.rounds:
        return False
    return ledger.took_s.get(ledger.rounds[0].index, _CHEAP_ROUND_S) < _CHEAP_ROUND_S


def _least_rounds(ledger: RoundLedger, findings: Conclusions, settings: LocalizeSettings) -> int:
    """Return how many rounds even a healthy run takes.

    One is enough, unless more are asked for or a second is cheap, where each node has a partner in
    it and pairs can be compared. Of three nodes each must meet each, and uplinks between leaf
    switches are crossed only from the second round on.
    """
    asked = _asked_rounds(findings, settings)
    again = not settings.alone and cheap_to_repeat(ledger, findings)
    return max(asked, _TWICE) if again else asked


def _asked_rounds(findings: Conclusions, settings: LocalizeSettings) -> int:
    """Return how many rounds a healthy run takes, whatever they cost."""
    nodes = findings.sources.nodes
    if nodes == 1:
        return 1
    if settings.alone:
        return settings.min_rounds
    if nodes == 3:
        return max(settings.min_rounds, 3)
    return max(settings.min_rounds, _ACROSS_LEAVES if findings.fabric.known else 1)
