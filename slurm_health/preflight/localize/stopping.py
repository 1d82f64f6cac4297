# SPDX-License-Identifier: Apache-2.0
"""Whether another round is worth its time, and which nodes it is for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import combinations
from statistics import NormalDist

import numpy as np

from slurm_health.preflight.localize.evidence import Bearing, RoundLedger
from slurm_health.preflight.localize.findings import Conclusions, lone_pairs
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.pairing import Pair, RoundRequest
from slurm_health.preflight.localize.settings import SMALL_RUN, LocalizeSettings

_SUSPICIOUS = 0.1  # a node that is bad with a smaller probability needs no more tests
_SUSPICIOUS_OF_FEW = 0.05  # the same if the prior alone comes close to that
# No other node can disturb a test of a node alone: it shows more than a test of a pair.
_SUSPICIOUS_ALONE = 0.3
_KNOWN_TROUBLE = 0.05  # a prior above this makes a node a suspect before the first round
_GIVE_UP_ON_SILENCE = 2  # rounds without an answer: the third would only cost another deadline
_SUSPECT_FABRIC = 0.5  # the same for leaves and paths, which many tests touch
_SURE = 1e-6  # probability of error below which a conviction needs no more tests
# If the processes of all nodes crash in so many rounds, more rounds change nothing: no crash
# convicts then, and two in a row differ from one that passed.
_CRASHING_ROUNDS = 2
_PATIENCE = 4  # rounds after which a slowdown that looks tolerable is not pursued
# Deviations of the middle half of the tests. A few odd tests of a small run may be noise or slow
# nodes: another round separates what repeats from what does not, likelihood does not. Several
# that lie less far out are as odd if noise brings about so many in one run of a hundred.
_ODD, _ODD_TOGETHER, _BY_CHANCE = 3.0, (2.5, 2.0, 1.5), 0.01
_NORMAL = NormalDist()
_CONTROL_FAILURES = 2  # a pair that fails so often is no control: its own path is bad
_ACROSS_LEAVES = 2  # rounds: the first pairs nodes inside their leaves, the second across them
# A second round of pairs, if one would do, is cheap among so few nodes if the first took less.
# Of more nodes as many as there are pairs would have to be equally slow; of three all meet anyhow.
_CHEAP_ROUND_S, _CHEAP_NODES, _TWICE = 2.0, range(4, 9), 2
_PAIR_ROUNDS = 3  # how many rounds beyond the least a doubtful pair may cost


def next_request(
    ledger: RoundLedger,
    findings: Conclusions,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> RoundRequest | None:
    """Return what the next round is for, None if no other round is needed."""
    begun = len(ledger.rounds)
    names = range(len(ledger.names))
    settled = {n for n in (*findings.guilty, *findings.silences) if _settled(findings, n)}
    active = tuple(node for node in names if node not in settled)
    trusted = findings.trusted - settled
    odd: frozenset[int] = frozenset()
    if findings.sources.nodes >= SMALL_RUN and begun < _PATIENCE:
        odd = odd.union(*(_odd_in(metric, settings) for metric in findings.metrics))
    still_open = _open(findings, begun, settings) if begun else frozenset()
    if begun:
        risk = findings.risk[: len(names)].tolist()
        for node, probability in prior.items():
            risk[node] = max(risk[node], probability / 100)
        undecided = still_open.union(odd, findings.guilty).intersection(active)
    else:
        risk = [prior.get(node, 0.0) for node in names]
        undecided = frozenset(node for node in active if risk[node] > _KNOWN_TROUBLE)
        trusted = frozenset(active) - undecided if undecided else trusted
    open_nodes = undecided - findings.guilty.keys()
    useful = any(_testable(ledger, findings, node, active, trusted) for node in open_nodes)
    doubtful = [pair for pair in lone_pairs(findings) if pair.unproven]
    costly = any(pair.striking for pair in doubtful) and begun < settings.min_rounds + _PAIR_ROUNDS
    control = _control(findings, active)
    first = findings.sources.nodes
    fabric = [int(v) + first for v in np.flatnonzero(findings.risk[first:] >= _SUSPECT_FABRIC)]
    fabric_open = any(variable not in findings.guilty for variable in fabric)
    doubt = bool(useful or costly or control or findings.suspicion.wanted or fabric_open)

    asked = _asked_rounds(findings, settings)
    least = asked
    # Two equally slow nodes in different pairs look healthy. If the time of a good pair is known,
    # that puts a slow pair in doubt; if not, a second round shows it, if it costs little.
    if begun and len(names) in _CHEAP_NODES and not (settings.alone or findings.expected_of_pairs):
        first_s = ledger.took_s.get(ledger.rounds[0].index, _CHEAP_ROUND_S)
        least = max(asked, _TWICE) if first_s < _CHEAP_ROUND_S else asked
    if begun >= least and not doubt:
        return None
    if begun >= settings.round_limit(len(ledger.names)) or not active:
        return None
    # The processes of all nodes crash: that is the software, and another round repairs nothing.
    if begun >= _CRASHING_ROUNDS and len(findings.crashes) == len(ledger.names):
        return None
    # A node without any partner is tested alone only while that can show more.
    lonely = begun and len(active) == 1 and not odd and active[0] in findings.tested
    if lonely and active[0] not in still_open:
        return None
    # The other nodes need no test to show whether a process that crashed alone crashes again.
    crashed_alone = settings.alone and undecided and undecided <= findings.crashes.keys()
    repeats = [*control, *findings.suspicion.wanted, *(pair.nodes for pair in doubtful)]
    repeats += _only_witnesses(ledger, findings, active)
    in_rounds = Counter(name for round_ in ledger.rounds for g in round_.groups for name in g)
    leaf = findings.fabric.leaf
    passed = [trial for trial in findings.trials if trial.bearing is Bearing.PASSED]
    inside = [t for t in passed if leaf[t.nodes[0]] == leaf[t.nodes[-1]] >= 0]
    return RoundRequest(
        active=tuple(sorted(undecided)) if crashed_alone else active,
        risk=risk,
        undecided=undecided,
        trusted=trusted,
        met=ledger.met,
        byes=tuple(begun - in_rounds[name] for name in ledger.names),
        leaf=leaf,
        repeats=tuple(pair for pair in repeats if {*pair} <= {*active}),
        seed=settings.seed,
        round_index=begun,
        tested_in_leaf=frozenset(node for trial in inside for node in trial.nodes),
        suspect_leaves=frozenset(v - first for v in fabric if v < first + findings.sources.leaves),
        shared_only=not (doubt or undecided) and begun >= asked,
    )


def _settled(findings: Conclusions, node: int) -> bool:
    """Return whether a node needs no more tests: surely convicted, or silent too often.

    A node that is slow by a narrow margin is tested as long as there are rounds for others: so the
    sum of all margins stays small, and another suspect can be convicted beside it.
    """
    guilt = findings.guilty.get(node, ())
    sure = any(g.metric is None or 1 - g.probability < _SURE for g in guilt)
    return sure or len(findings.silences.get(node, ())) >= _GIVE_UP_ON_SILENCE


def _open(findings: Conclusions, begun: int, settings: LocalizeSettings) -> frozenset[int]:
    """Return the nodes about which it matters to know more."""
    nodes = findings.sources.nodes
    limit = _SUSPICIOUS_OF_FEW if nodes < SMALL_RUN else _SUSPICIOUS
    limit = _SUSPICIOUS_ALONE if settings.alone else limit
    suspicious = findings.bad[:nodes] >= limit
    for metric in findings.metrics:
        slow = metric.slowness.beyond[:nodes] >= limit
        if begun >= _PATIENCE:
            slow &= metric.slowness.effect[:nodes] >= np.log1p(metric.floor)
        suspicious |= slow
    untested = frozenset(range(nodes)) - findings.tested
    # A process may crash now and then, and a round alone costs little.
    crashed = findings.crashes if settings.alone else ()
    return untested.union(np.flatnonzero(suspicious).tolist(), crashed)


def _odd_in(metric: MetricEvidence, settings: LocalizeSettings) -> frozenset[int]:
    """Return the nodes whose fastest test lies outside the scatter of most tests.

    Noise averages out with the number of tests. Lasting differences of devices raise the floor, but
    one test of each does not show them: then the configured floor counts.
    """
    nodes, fastest, tests = metric.fastest
    noise = metric.middle_noise / np.sqrt(tests)
    floors = np.where(metric.shared | (tests > 1), metric.floor, settings.compute_floor)
    odd: set[int] = set(nodes[fastest > np.maximum(np.log1p(floors), _ODD * noise)].tolist())
    together = 2 if metric.shared else 1  # nodes of a pair are odd or well in the same tests
    for deviations in _ODD_TOGETHER:
        levels = np.maximum(np.log1p(floors), deviations * noise)
        out = nodes[fastest > levels]
        different, counts = np.unique(levels / noise, return_counts=True)
        chances = [_NORMAL.cdf(-level) for level in different.tolist()]
        share = float(np.average(chances, weights=counts))
        if chance_of_so_many(len(out) // together, len(nodes) // together, share) <= _BY_CHANCE:
            odd.update(out.tolist())
    return frozenset(odd)


def chance_of_so_many(count: int, tests: int, share: float) -> float:
    """Return the probability of at least `count` among `tests` that have the probability `share`.

    That is the upper tail of the binomial distribution.
    """
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    fewer = (
        math.lgamma(tests + 1)
        - math.lgamma(number + 1)
        - math.lgamma(tests - number + 1)
        + number * math.log(share)
        + (tests - number) * math.log1p(-share)
        for number in range(count)
    )
    return max(0.0, 1.0 - sum(map(math.exp, fewer)))


def _testable(
    ledger: RoundLedger,
    findings: Conclusions,
    node: int,
    active: Collection[int],
    trusted: Collection[int],
) -> bool:
    """Return whether another test can change what is known about an open node.

    If no node is trusted only a new partner can help, unless the node is slow, crashed or has not
    been tested at all: then any partner does.
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


def _only_witnesses(
    ledger: RoundLedger, findings: Conclusions, active: Collection[int]
) -> list[Pair]:
    """Return the pairs that passed, if all nodes met each other and none is trusted yet."""
    everyone = {*active}
    if findings.trusted & everyone or any(everyone - ledger.met[n] - {n} for n in active):
        return []
    pairs = dict.fromkeys(
        (trial.nodes[0], trial.nodes[1])
        for trial in findings.trials
        if trial.bearing is Bearing.PASSED and len(trial.nodes) == 2
        if all(findings.bad[node] < _SUSPECT_FABRIC for node in trial.nodes)
    )
    return list(pairs) if len(findings.trials) > len(pairs) else []


def _control(findings: Conclusions, active: Collection[int]) -> list[Pair]:
    """Return two nodes to test as a control, if no test shows how fast others are.

    Some nodes cannot be convicted without a control. A node that was in every test has none: all of
    them are as slow as that node.
    """
    judged = {*findings.uncontrolled}
    for metric in findings.metrics:
        if metric.shared:
            judged.update(
                int(node)
                for node in metric.data.sources[0]
                if 0 <= node < findings.sources.nodes
                if (metric.data.sources == node).any(axis=1).all()
            )
    if not judged:
        return []
    others = [node for node in active if node in findings.passed and node not in judged]
    others.sort(key=lambda node: findings.risk[node])
    failures = Counter(t.nodes for t in findings.trials if t.bearing is Bearing.FAILED)
    pairs = ((min(pair), max(pair)) for pair in combinations(others, 2))
    good = next((pair for pair in pairs if failures[pair] < _CONTROL_FAILURES), None)
    return [good] if good else []


def _asked_rounds(findings: Conclusions, settings: LocalizeSettings) -> int:
    """Return how many rounds a healthy run takes, whatever they cost.

    One is enough, unless the config file asks for more, if it gives each node a partner and pairs
    can be compared. Of three nodes all must meet. Only the second round crosses the uplinks between
    leaf switches.
    """
    nodes = findings.sources.nodes
    if nodes == 1:
        return 1
    if settings.alone:
        return settings.min_rounds
    if nodes == 3:
        return max(settings.min_rounds, 3)
    return max(settings.min_rounds, _ACROSS_LEAVES if findings.fabric.known else 1)
