# SPDX-License-Identifier: Apache-2.0
"""How fast a training is: slow ranks, uneven work, and steps that take longer than before.

All three come from the same windows of time. In a window every rank has a `StepCost`, and every
role, such as a stage of a pipeline, has a usual one. A condition that lasts for several windows is
a `PaceFinding`, reported once until it is over:

- STRAGGLER: a rank takes longer by itself than those with its role, also for as many tokens.
- UNEVEN: all ranks of a role take longer than other roles, or batches differ. No rank is slow.
- SLOWDOWN: steps take longer than earlier ones because of communication, not of any rank.

The rules at the end infer why a rank is slow, and which node's link slows the steps down. Slowness
alone blames no node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, median, median_low

import msgspec

from slurm_health.records.script_records import (
    MOST_LINES,
    SLOWER_RANK,
    SLOWER_STEPS,
    EventKind,
)
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.output_lines import NonFiniteLoss
from slurm_health.training.diagnosis.pulse import Program
from slurm_health.training.diagnosis.samples import RankSample
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

STAGES, DATA, NOT_A_NUMBER = "uneven-stages", "uneven-data", "not-a-number"
FEWEST_STEPS = 3  # of every rank in a window
FEWEST_RANKS = 3  # of a role: of two that differ either may be the slow one
SLOWER = 1.10  # times the usual, in all of the latest WINDOWS
WINDOWS = 5
# Without roles, so many slower ranks have another role rather than faults of their own.
_CROWD, _CROWD_SHARE = 2, 1 / 4
_FEWEST_REPLICAS = 3
_SLOWEST_IN_TURN = 2  # replicas: a slow machine stays the same one
_NOT_SHARED = 0.25  # of the variance between ranks of a role: at most so much within a replica
_USUAL_WINDOWS, _LONGER_WINDOWS = 3, 3  # a checkpoint or an evaluation is over by then
_LONGER = 0.3  # of a usual step
_MOST = 0.5  # of a difference: a part of this size explains it
_KEPT = 60  # windows
# Connections of healthy nodes differ by the pace of their readers; a slow link differs by more.
_SLOW_LINK, _FAST_LINK = 1 / 4, 1 / 2
_TICK_S = 0.01  # the kernel counts time in ticks of 1 to 10 ms
_FEWEST_BYTES = 1 << 20  # of fewer, the speed of a connection says little

_CHECK = "check {node} before the next start (slurm-health check --straggler-detection)"
_TOP = (
    "look at the processes on {node} (top), and whether threads and data loader workers outnumber"
    " the processors (--cpus-per-task, OMP_NUM_THREADS)"
)
_CPU_LIMIT = (
    "look at the limits (cpu.max, or cpu.cfs_quota_us) of its cgroups on {node}, and at the job's"
    " processors (--cpus-per-task)"
)
_LOADER = (
    "look at the filesystem of its data on {node}; more workers of the loader may hide the wait"
    " (num_workers, prefetch_factor)"
)

Sent = Mapping[str, Mapping[str, tuple[int, float]]]
"""By node and address of the peer: bytes sent so far, and seconds that this took."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a step for a rank, in ms: in all, its own part, and by the times of `RankSample`.

    `own_ms` is 0 if the rank does not report it; `tokens` are those of a step.
    """

    step_ms: float = 0.0
    own_ms: float = 0.0
    loading_ms: float = 0.0
    ran_ms: float = 0.0
    unserved_ms: float = 0.0
    throttled_ms: float = 0.0
    tokens: float = 0.0

    @property
    def waits_ms(self) -> float:
        """The time of communication: all but its own."""
        return self.step_ms - self.own_ms

    def times_tokens(self, usual: StepCost) -> float:
        """Return the ratio of its tokens to the usual ones, 1 if either is unknown."""
        return self.tokens / usual.tokens if self.tokens and usual.tokens else 1.0

    def is_slower(self, usual: StepCost) -> bool:
        """Whether it takes longer than usual, also for its tokens."""
        return self.own_ms >= SLOWER * usual.own_ms * max(1.0, self.times_tokens(usual))


def middle(costs: Iterable[StepCost]) -> StepCost:
    """Return the medians of all figures."""
    rows = list(costs)
    names = StepCost.__struct_fields__
    return StepCost(**{name: median(getattr(row, name) for row in rows) for name in names})


class PathSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of the job's connections from one node to another."""

    node: str
    peer: str
    mb_per_s: float

    @property
    def ends(self) -> frozenset[str]:
        """Both nodes."""
        return frozenset({self.node, self.peer})


class PaceFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that lasted for several windows.

    Args:
        event: STRAGGLER, SLOWDOWN or UNEVEN.
        name: STAGES or DATA for uneven work.
        nodes: of the slow rank, or all nodes with slower steps.
        ranks: the slow one, or those with the most work.
        cost: of the slow rank, or of a step now.
        usual: of the ranks with its role, or of a step before.
        ratio: its time divided by that of the others.
        reports_loading: the rank reports its waits for data.
        roles: those with the most work, none if no role is known.
        one_node: the uneven ranks are all on one node, which may be the reason.
        figures: the evidence of uneven work, in words.
        speeds: of the connections between `nodes` while steps were slow.
    """

    event: EventKind
    name: str = ""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    cost: StepCost = StepCost()
    usual: StepCost = StepCost()
    ratio: float = 0.0
    reports_loading: bool = False
    roles: tuple[str, ...] = ()
    one_node: bool = False
    figures: str = ""
    speeds: tuple[PathSpeed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The costs of all ranks in a window, and the usual ones by role and of the steps."""

    samples: Mapping[int, RankSample]
    costs: Mapping[int, StepCost]  # of those that report their own time
    usual: Mapping[str, StepCost]
    step: StepCost

    def of_role(self, role: str) -> list[int]:
        return [rank for rank in self.costs if self.samples[rank].role == role]

    def usual_of(self, rank: int) -> StepCost | None:
        """Return the usual cost for a rank, None if too few ranks have its role."""
        role = self.samples[rank].role
        return self.usual[role] if len(self.of_role(role)) >= FEWEST_RANKS else None

    def ratio(self, rank: int) -> float:
        usual = self.usual_of(rank)
        return self.costs[rank].own_ms / usual.own_ms if usual else 0.0


@dataclass
class _Run:
    """One program: the begin of its current window, its windows, and its reported findings."""

    began: Mapping[int, tuple[RankSample, float]] = field(default_factory=dict)
    windows: deque[_Window] = field(default_factory=lambda: deque(maxlen=_KEPT))
    reported: frozenset[str] = frozenset()


class PaceAnalysis:
    """Closes windows of time by program, and returns new findings."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def close_window(self, programs: Iterable[Program]) -> list[PaceFinding]:
        """Close the windows of programs with enough steps; return new findings."""
        new = []
        for program in programs:
            run = self._runs.setdefault(program.name, _Run())
            now = {
                rank: (last.sample, last.at_s - last.sample.age_s)
                for rank, last in program.ranks.items()
                if last.sample.steps and not last.gone
            }
            made = [
                s.steps - run.began[rank][0].steps
                for rank, (s, _) in now.items()
                if rank in run.began
            ]
            if not made or len(made) < len(now) or min(made) < 0:  # new ranks, or a new start
                run.began = now
                run.windows.clear()
                continue
            if min(made) < FEWEST_STEPS:  # too short a window for these steps: it goes on
                continue
            run.windows.append(_window(run.began, now))
            run.began = now
            shown = _shown(run.windows)
            new += [finding for key, finding in shown.items() if key not in run.reported]
            run.reported = frozenset(shown)
        return new


def _window(
    began: Mapping[int, tuple[RankSample, float]], now: Mapping[int, tuple[RankSample, float]]
) -> _Window:
    steps_ms, costs = [], {}
    for rank, (sample, last_s) in now.items():
        before, before_s = began[rank]
        steps_ms.append(1e3 * (last_s - before_s) / (sample.steps - before.steps))
        if sample.own_steps > before.own_steps and sample.own_s > before.own_s:
            steps = sample.own_steps - before.own_steps
            costs[rank] = StepCost(
                step_ms=steps_ms[-1],
                own_ms=1e3 * (sample.own_s - before.own_s) / steps,
                loading_ms=1e3 * (sample.loading_s - before.loading_s) / steps,
                ran_ms=1e3 * (sample.ran_s - before.ran_s) / steps,
                unserved_ms=1e3 * (sample.unserved_s - before.unserved_s) / steps,
                throttled_ms=1e3 * (sample.throttled_s - before.throttled_s) / steps,
                tokens=(sample.tokens - before.tokens) / steps,
            )
    by_role: dict[str, list[StepCost]] = {}
    for rank, cost in costs.items():
        by_role.setdefault(now[rank][0].role, []).append(cost)
    own_ms = max((cost.own_ms for cost in costs.values()), default=0.0)
    return _Window(
        samples={rank: sample for rank, (sample, _) in now.items()},
        costs=costs,
        usual={role: middle(rows) for role, rows in by_role.items()},
        step=StepCost(step_ms=median(steps_ms), own_ms=own_ms),
    )


def _shown(windows: Sequence[_Window]) -> dict[str, PaceFinding]:
    """Return the findings of the latest windows, by a key that is stable while they last."""
    latest = list(windows)[-WINDOWS:]
    shown: dict[str, PaceFinding] = {}
    if len(latest) == WINDOWS:
        slow, stages = _slow_ranks(latest)
        shown |= {f"rank {finding.ranks[0]}": finding for finding in slow}
        uneven = (_uneven_roles(latest) or stages, _uneven_tokens(latest) or _replicas(latest))
        nodes = {rank: sample.node for rank, sample in latest[-1].samples.items()}
        for work in filter(None, uneven):
            one_node = len({nodes.get(rank) for rank in work.ranks}) == 1
            shown[work.name] = msgspec.structs.replace(work, one_node=one_node)
    slowdown = _slowdown([window.step for window in windows])
    return {**shown, SLOWER_STEPS: slowdown} if slowdown else shown


def _slow_ranks(windows: Sequence[_Window]) -> tuple[list[PaceFinding], PaceFinding | None]:
    """Return the slow ranks; if they are too many to be slow, uneven work instead."""
    last, slow = windows[-1], []
    for rank, sample in last.samples.items():
        pairs = [
            (window.costs[rank], usual)
            for window in windows
            if rank in window.costs and (usual := window.usual_of(rank))
        ]
        if len(pairs) == len(windows) and all(cost.is_slower(usual) for cost, usual in pairs):
            finding = PaceFinding(
                event=EventKind.STRAGGLER,
                nodes=(sample.node,),
                ranks=(rank,),
                cost=middle(cost for cost, _ in pairs),
                usual=middle(usual for _, usual in pairs),
                ratio=median(cost.own_ms / usual.own_ms for cost, usual in pairs),
                reports_loading=sample.batches > 0,
            )
            slow.append(finding)
    alike = not any(last.samples[rank].role for rank in last.costs)
    if not alike or len(slow) < max(_CROWD, _CROWD_SHARE * len(last.costs)):
        return slow, None
    ratio = median(finding.ratio for finding in slow)
    crowd = PaceFinding(
        event=EventKind.UNEVEN,
        name=STAGES,
        ratio=ratio,
        ranks=tuple(finding.ranks[0] for finding in slow),
        figures=f"{len(slow)} ranks take {ratio:.2f} times the median of all; no roles are known",
    )
    return [], crowd


def _uneven_roles(windows: Sequence[_Window]) -> PaceFinding | None:
    """Return the roles whose ranks all take longer than is usual for the other roles."""
    ratios: dict[str, list[float]] = {}
    for window in windows:
        for role in window.usual:
            others = [cost.own_ms for other, cost in window.usual.items() if other != role]
            own = [window.costs[rank].own_ms for rank in window.of_role(role)]
            if others and len(own) > 1 and min(own) >= SLOWER * median_low(others):
                ratios.setdefault(role, []).append(median(own) / median_low(others))
    heavy = {role: median(r) for role, r in ratios.items() if len(r) == len(windows)}
    if not heavy:
        return None
    last = windows[-1]
    costs = (f"{role} {cost.own_ms:.0f} ms" for role, cost in sorted(last.usual.items()))
    return PaceFinding(
        event=EventKind.UNEVEN,
        name=STAGES,
        roles=tuple(sorted(heavy)),
        ratio=max(heavy.values()),
        ranks=tuple(rank for role in sorted(heavy) for rank in last.of_role(role)),
        figures=f"a rank takes by itself, per step: {'; '.join(costs)}",
    )


def _uneven_tokens(windows: Sequence[_Window]) -> PaceFinding | None:
    """Return that in every window some rank takes longer, and has as many more tokens."""
    heaviest: list[tuple[float, float, int]] = []
    for window in windows:
        heavy = []
        for rank, cost in window.costs.items():
            usual = window.usual[window.samples[rank].role]
            times, tokens = cost.own_ms / usual.own_ms, cost.times_tokens(usual)
            if min(times, tokens) >= SLOWER and not cost.is_slower(usual):
                heavy.append((times, tokens, rank))
        if not heavy:
            return None
        heaviest.append(max(heavy))
    times, tokens = (median(row[column] for row in heaviest) for column in (0, 1))
    return PaceFinding(
        event=EventKind.UNEVEN,
        name=DATA,
        ratio=times,
        ranks=tuple(sorted({rank for _, _, rank in heaviest})),
        figures=f"the rank that takes longest has {tokens:.2f} times the usual tokens and takes"
        f" {times:.2f} times the usual time",
    )


def _replicas(windows: Sequence[_Window]) -> PaceFinding | None:
    """Return that the parts of a replica are slower together, another replica's at another time.

    Parts of one replica of the model share nothing but their data.
    """
    slowest: list[tuple[float, int]] = []
    within = between = 0.0
    for window in windows:
        parts: dict[int, dict[str, list[float]]] = {}
        for rank in window.costs:
            sample, ratio = window.samples[rank], window.ratio(rank)
            if ratio and sample.replica >= 0:
                parts.setdefault(sample.replica, {}).setdefault(sample.role, []).append(ratio)
        ratios = {r: [*chain(*of.values())] for r, of in parts.items() if len(of) > 1}
        if len(ratios) < _FEWEST_REPLICAS:
            return None
        slowest.append(max((fmean(own), replica) for replica, own in ratios.items()))
        within += sum((ratio - fmean(own)) ** 2 for own in ratios.values() for ratio in own)
        between += sum((ratio - 1.0) ** 2 for own in ratios.values() for ratio in own)
    ratio = median(mean for mean, _ in slowest)
    in_turn = len({replica for _, replica in slowest})
    if ratio < SLOWER or in_turn < _SLOWEST_IN_TURN or within > _NOT_SHARED * between:
        return None
    samples = windows[-1].samples
    return PaceFinding(
        event=EventKind.UNEVEN,
        name=DATA,
        ratio=ratio,
        ranks=tuple(r for r, sample in samples.items() if sample.replica == slowest[-1][1]),
        figures=f"the slowest replica of the model takes {ratio:.2f} times the usual time, all of"
        f" its parts alike, and in {len(slowest)} windows that was one of {in_turn} replicas",
    )


def _slowdown(steps: Sequence[StepCost]) -> PaceFinding | None:
    """Return that ranks wait much longer than usual, and that this makes up most of the slowdown.

    A rank without a processor computes longer, and serves its connections late as well: the others
    wait, and those connections look slow.
    """
    earlier, latest = steps[:-_LONGER_WINDOWS], steps[-_LONGER_WINDOWS:]
    if len(earlier) < _USUAL_WINDOWS:
        return None
    usual = middle(earlier)
    for step in latest:
        longer_ms, waits_ms = step.step_ms - usual.step_ms, step.waits_ms - usual.waits_ms
        if waits_ms < max(_LONGER * usual.step_ms, _MOST * longer_ms):
            return None
    return PaceFinding(event=EventKind.SLOWDOWN, cost=middle(latest), usual=usual)


def speeds_of(
    before: Sent, after: Sent, addresses: Mapping[str, str], nodes: Iterable[str]
) -> tuple[PathSpeed, ...]:
    """Return the speeds between two reports; `addresses` maps addresses to nodes.

    The speed of a connection is its bytes divided by the time in which it had data to send and its
    peer accepted it.
    """
    known = set(nodes)
    speeds = []
    for node, peers in after.items():
        sums: dict[str, tuple[float, float]] = {}
        for address, (sent, seconds) in peers.items():
            peer = addresses.get(address, "")
            first = before.get(node, {}).get(address)
            # The bytes of a connection that was closed meanwhile are gone.
            if peer not in known or first is None or sent < first[0] or seconds < first[1]:
                continue
            so_far = sums.get(peer, (0.0, 0.0))
            sums[peer] = so_far[0] + sent - first[0], so_far[1] + seconds - first[1]
        speeds += [
            PathSpeed(node=node, peer=peer, mb_per_s=round(sent / max(seconds, _TICK_S) / 1e6, 3))
            for peer, (sent, seconds) in sums.items()
            if sent >= _FEWEST_BYTES
        ]
    return tuple(speeds)


def observe_pace(data: DataManager) -> Inference | None:
    """Return the symptom of a finding about the pace, or of a loss that is NaN or infinite."""
    loss, finding = data.get(NonFiniteLoss), data.get(PaceFinding)
    if loss is not None:
        since, before = f", since step {loss.step}", f"step {loss.step}"
        if not loss.step:
            since, before = "", "the first of these lines"
        return Inference(
            name=NOT_A_NUMBER,
            description=f"the loss is NaN or infinite at one step after another{since}",
            attribution=Attribution.USER,
            sureness=Sureness.LIKELY,
            evidence=(loss.first, loss.line),
            advice="look at the data, the learning rate and the loss scale, and go on from a"
            f" checkpoint before {before}",
        )
    if finding is None:
        return None
    if finding.event is EventKind.UNEVEN:
        return _uneven(finding)
    if finding.event is EventKind.SLOWDOWN:
        now_ms, usual_ms = finding.cost.step_ms, finding.usual.step_ms
        description = (
            f"a step takes {now_ms:.0f} ms instead of {usual_ms:.0f} ms; the collected data"
        )
        description += " does not show why"
        slower = now_ms > usual_ms
        return Inference(name=SLOWER_STEPS, description=description) if slower else None
    unknown = "a device, a filesystem or a library"
    advice = _CHECK
    if not finding.reports_loading:
        unknown = f"its data, {unknown}"
        advice += "; heartbeat.loading(loader) would show waits for data"
    return _of_rank(
        finding,
        SLOWER_RANK,
        f"slower than the others and waits for an unknown reason ({unknown})",
        sureness=Sureness.POSSIBLE,
        advice=advice,
    )


def why_slower(_: Inference, data: DataManager) -> Inference | None:
    """Infer why a rank is slower, by the largest part of its time over the others.

    Without a processor it is late in everything; a rank that loads does not compute.
    """
    finding = data.get(PaceFinding)
    if finding is None or finding.event is not EventKind.STRAGGLER:
        return None
    cost, usual = finding.cost, finding.usual
    most_ms = _MOST * (cost.own_ms - usual.own_ms)
    if most_ms <= 0:
        return None
    if cost.unserved_ms - usual.unserved_ms >= most_ms:
        evidence = ["its main thread was ready to run and did not for " + _ms(finding, "unserved")]
        name, why, advice = "no-processor", "waits for a processor: others use its processors", _TOP
        if cost.throttled_ms - usual.throttled_ms >= most_ms:
            why, advice = "waits for a processor: a CPU limit holds it back", _CPU_LIMIT
            held_ms = f"{cost.throttled_ms:.0f} ms per step"
            evidence.append(f"its cgroup was held back by its CPU limit, {held_ms}")
    elif cost.loading_ms - usual.loading_ms >= most_ms:
        name, why, advice = "slow-data-loader", "waits for its data loader", _LOADER
        evidence = ["its data kept it waiting for " + _ms(finding, "loading")]
    elif cost.ran_ms - usual.ran_ms >= most_ms:
        name, advice = "computes-longer", f"{_CHECK}; check whether this rank has longer batches"
        why = "computes for longer: a slower processor or device, or more work than the others"
        evidence = ["its main thread ran for " + _ms(finding, "ran")]
    else:
        return None
    return _of_rank(finding, name, f"slow because it {why}", evidence, advice=advice)


def _ms(finding: PaceFinding, what: str) -> str:
    own_ms, usual_ms = (getattr(cost, f"{what}_ms") for cost in (finding.cost, finding.usual))
    return f"{own_ms:.0f} ms per step, {usual_ms:.0f} ms usual"


def _of_rank(
    finding: PaceFinding,
    name: str,
    description: str,
    evidence: Sequence[str] = (),
    *,
    sureness: Sureness = Sureness.LIKELY,
    advice: str,
) -> Inference:
    (rank,), (node,) = finding.ranks, finding.nodes
    return Inference(
        name=name,
        description=f"rank {rank} on {node} is {description}",
        sureness=sureness,
        nodes=(node,),
        ranks=(rank,),
        evidence=("by itself it takes " + _ms(finding, "own"), *evidence),
        advice=advice.format(node=node),
    )


def slow_paths(_: Inference, data: DataManager) -> Inference | None:
    """Some connections are many times slower than others, and lead to one node.

    It is the common end of all slow connections, and of no fast one.
    """
    finding = data.get(PaceFinding)
    if finding is None or len(finding.speeds) < 2:
        return None
    by_speed = sorted(finding.speeds, key=lambda path: path.mb_per_s)
    fastest = by_speed[-1].mb_per_s
    slow = [path for path in by_speed if path.mb_per_s < _SLOW_LINK * fastest]
    fast = [path.ends for path in by_speed if path.mb_per_s >= _FAST_LINK * fastest]
    if not slow:
        return None
    shared = frozenset.intersection(*(path.ends for path in slow)) - frozenset().union(*fast)
    one = len(shared) == 1 and len({path.ends for path in slow}) > 1
    nodes = tuple(sorted(shared)) if one else ()
    link = f"the network link of {listed(nodes)}" if one else "the network"
    own = f", {finding.cost.own_ms:.0f} ms of it a rank's own" if finding.cost.own_ms else ""
    usual_ms = finding.usual.step_ms
    return Inference(
        name="slow-network",
        description=f"{link} is slow: ranks wait longer for each other than before",
        sureness=Sureness.LIKELY if one else Sureness.POSSIBLE,
        nodes=nodes,
        evidence=(
            f"a step takes {finding.cost.step_ms:.0f} ms{own}; before, {usual_ms:.0f} ms",
            *(
                f"{path.node} sends {path.mb_per_s:.1f} MB/s to {path.peer} while it sends"
                for path in slow[:MOST_LINES]
            ),
            f"the fastest connection sends {fastest:.0f} MB/s",
        ),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def _uneven(finding: PaceFinding) -> Inference:
    """Return the inference about uneven work: it blames the script at most, and no node."""
    sure, times = True, f"{finding.ratio:.2f} times as long"
    if finding.name == DATA:
        description = "batches are uneven: ranks with the same part of the model have more work in"
        description += " turn, as with longer sequences"
        advice = (
            "sort or pack sequences so that all ranks have equal work (attention grows with the"
        )
        advice += " square of a sequence's length)"
    elif finding.roles:
        sure = not finding.one_node
        node = "" if sure else ", or its only node is slow"
        description = f"{', '.join(finding.roles)} takes {times} as the other roles: it has more"
        description += f" work{node}"
        advice = "give that stage fewer layers, or count the embedding and the loss as layers"
    else:
        sure = False
        description = f"{len(finding.ranks)} ranks take {times} as the others, as with stages that"
        description += " have more work"
        advice = "name ranks with the same work by heartbeat.role(...), so that these are compared"
    return Inference(
        name=finding.name,
        description=description,
        attribution=Attribution.USER if sure else Attribution.UNDECIDED,
        sureness=Sureness.LIKELY if sure else Sureness.POSSIBLE,
        evidence=(finding.figures,),
        advice=advice,
    )
