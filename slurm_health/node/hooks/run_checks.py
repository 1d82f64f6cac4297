# SPDX-License-Identifier: Apache-2.0
"""Run configured checks at once, each in a child, and judge what they saw."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Planned
from slurm_health.node.rules.finding import CheckResult, Finding, capped, inconclusive, node_fault
from slurm_health.node.rules.settings import matches
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.text import one_line
from slurm_health.system.killable import (
    Answered,
    Broke,
    Hung,
    Stuck,
    Work,
    WorkResult,
    recall_stuck,
    remember_stuck,
    run_all,
)

if TYPE_CHECKING:
    from slurm_health.node.rules.recovery import DrainRecord

_MOST_SHARED = 4
# A check that is still ready to run, and had no processor for so large a share of its time, has
# not hung: it could not be measured.
_STARVED = 0.5
_encoder = msgspec.msgpack.Encoder()


def run_checks(planned: Sequence[Planned], place: CheckContext) -> list[CheckResult]:
    """Run checks in parallel. Takes no longer than the longest time limit and a moment.

    Checks that look at a few files share children, because a child costs more than they do. Should
    one of those not end in half of its checks' shortest limit, each of its checks gets a child of
    its own for the rest of the time, and the one that hangs is named.

    A check whose last child the kernel holds gets no other.
    """
    held = recall_stuck(place.state)
    fresh = _run([each for each in planned if each.name not in held], place)
    for name, outcome in fresh.items():
        if isinstance(outcome, Hung) and outcome.abandoned:
            remember_stuck(place.state, name, outcome.abandoned)
    return [_result(each, fresh.get(each.name) or held[each.name]) for each in planned]


def run_again(planned: Sequence[Planned], place: CheckContext) -> list[CheckResult]:
    """Run checks as `run_checks` does, and after them, one by one, those that need a node alone."""
    results = run_checks([each for each in planned if not each.exclusive], place)
    for each in planned:
        if each.exclusive:
            results += run_checks([each], place)
    return results


def after_drain(place: CheckContext, drained: DrainRecord) -> CheckContext:
    """Return where checks run again that a node was drained for: told what they were told then."""
    from slurm_health.node.rules.recovery import uptime_s

    return msgspec.structs.replace(
        place,
        environ={**place.environ, **drained.expected},
        drained_uptime_s=uptime_s(drained.found, place.boot_time()),
    )


def _run(planned: Sequence[Planned], place: CheckContext) -> dict[str, WorkResult]:
    alone = [each for each in planned if not each.check.TOGETHER]
    groups = _groups([each for each in planned if each.check.TOGETHER])
    work = {each.name: (_work(each.check, place), each.time_limit_s) for each in alone}
    for number, group in enumerate(groups):
        work[_shared_name(number)] = (_shared_work(group, place), _shared_limit_s(group))
    outcomes = run_all(work)
    again: dict[str, tuple[Work, float]] = {}
    for number, group in enumerate(groups):
        shared = outcomes.pop(_shared_name(number))
        if isinstance(shared, Answered):
            outcomes |= _parted(group, shared)
        else:
            spent_s = _shared_limit_s(group)
            again |= {
                each.name: (_work(each.check, place), each.time_limit_s - spent_s) for each in group
            }
    return outcomes | run_all(again)


def _groups(shared: Sequence[Planned]) -> list[list[Planned]]:
    """Divide checks among as many children as can run at once; what looks at the same goes to one.

    To look at all processes, or at the kernel's log, takes longer than all else together.
    """
    heavy: dict[str, list[Planned]] = {}
    light: list[list[Planned]] = []
    for each in shared:
        if each.check.LOOKS_AT:
            heavy.setdefault(each.check.LOOKS_AT, []).append(each)
        else:
            light.append([each])
    families = [*heavy.values(), *light]
    count = min(_MOST_SHARED, os.cpu_count() or 1, len(families))
    groups: list[list[Planned]] = [[] for _ in range(count)]
    for family in families:
        min(groups, key=len).extend(family)
    return groups


def _shared_name(number: int) -> str:
    """Return a name that no check has."""
    return f" {number}"


def _shared_limit_s(group: Sequence[Planned]) -> float:
    return min(each.time_limit_s for each in group) / 2


def _work(check: Check, place: CheckContext) -> Work:
    return lambda: _encoder.encode(check.collect(place))


def _shared_work(shared: Sequence[Planned], place: CheckContext) -> Work:
    def work() -> bytes:
        machine = msgspec.structs.replace(place, looked={})
        parts: list[Answered | Broke] = []
        for each in shared:
            began_s = time.monotonic()
            try:
                data = _encoder.encode(each.check.collect(machine))
                parts.append(Answered(data, time.monotonic() - began_s))
            except Exception as err:  # told by the parent, as for a child of its own
                reason = str(err) or type(err).__name__
                parts.append(Broke(reason, time.monotonic() - began_s))
        return _encoder.encode(parts)

    return work


def _parted(group: Sequence[Planned], shared: Answered) -> dict[str, WorkResult]:
    parts = from_msgpack(shared.data, list[Answered | Broke])
    return {each.name: part for each, part in zip(group, parts, strict=True)}


def _result(planned: Planned, outcome: WorkResult | Stuck) -> CheckResult:
    finding = _finding(planned, outcome)
    # Users choose the names of processes and files; what is said of them reaches root's terminal.
    finding = msgspec.structs.replace(finding, text=one_line(finding.text))
    return CheckResult(
        name=planned.name,
        finding=capped(finding, planned.severity),
        elapsed_ms=round(_elapsed_s(planned, outcome) * 1000, 1),
        shadow=planned.shadow,
        hung=isinstance(outcome, (Hung, Stuck)),
    )


def _elapsed_s(planned: Planned, outcome: WorkResult | Stuck) -> float:
    match outcome:
        case Stuck():
            return 0.0
        case Hung():
            return planned.time_limit_s
        case Answered(elapsed_s=elapsed_s) | Broke(elapsed_s=elapsed_s):
            return elapsed_s


def _finding(planned: Planned, outcome: WorkResult | Stuck) -> Finding:
    match outcome:
        case Stuck(pid=pid):
            judged = node_fault if planned.hang_is_fault else inconclusive
            return judged(f"not run: process {pid} of an earlier run waits in the kernel")
        case Hung(limit_s=limit_s, unserved_s=unserved_s) if unserved_s >= _STARVED * limit_s:
            return inconclusive(
                f"did not end within {planned.time_limit_s:g} s, and waited for a processor for"
                f" {unserved_s:.1f} s of the last {limit_s:g}"
            )
        case Hung(abandoned=abandoned):
            left = " and cannot be killed (its process waits in the kernel)" if abandoned else ""
            judged = node_fault if planned.hang_is_fault else inconclusive
            return judged(f"did not end within {planned.time_limit_s:g} s{left}")
        case Broke(reason=reason):
            return inconclusive(f"could not be measured: {reason}")
        case Answered(data=data):
            return _judged(planned.check, data)


def _judged(check: Check, data: bytes) -> Finding:
    try:
        finding = check.judge(from_msgpack(data, check.SEEN))
    except Exception as err:  # a check from elsewhere must not end the hook
        return inconclusive(f"could not be judged: {type(err).__name__}: {err}")
    figures = {name: value for name, value in finding.figures.items() if _is_plain(value)}
    return msgspec.structs.replace(finding, figures=figures)


def _is_plain(value: object) -> bool:
    """Tell whether a figure can be written as JSON."""
    return not isinstance(value, float) or math.isfinite(value)


class ChosenCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check, and why it does not run here; empty when it does."""

    planned: Planned
    why_not: str


def node_name(environ: Mapping[str, str]) -> str:
    """Return this node's name: what slurmd says, else the host's own without its domain."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def choose(
    checks: Iterable[Planned], *, context: str, node: str, partition: str | None
) -> list[ChosenCheck]:
    """Decide for each check whether it runs.

    Args:
        checks: all that are configured.
        context: the hook.
        node: this node's name.
        partition: the job's, None where nobody knows: then a check for some partitions only
            does not run.
    """
    return [
        ChosenCheck(planned=each, why_not=_why_not(each, context, node, partition))
        for each in checks
    ]


def _why_not(planned: Planned, context: str, node: str, partition: str | None) -> str:
    if context not in planned.contexts:
        return f"runs in {', '.join(planned.contexts) or 'no hook'}"
    if not matches(node, planned.nodes):
        return f"for nodes {' '.join(planned.nodes)}, this is {node}"
    if planned.partitions and partition is None:
        return f"for partitions {' '.join(planned.partitions)}, and there is no job here"
    if planned.partitions and not matches(str(partition), planned.partitions):
        return f"for partitions {' '.join(planned.partitions)}, the job's is {partition}"
    return ""


def running(choices: Iterable[ChosenCheck]) -> list[Planned]:
    """Return the checks that run."""
    return [each.planned for each in choices if not each.why_not]


def confirming(
    checks: Sequence[Planned], component: str, node: str, partition: str | None = None
) -> list[Planned]:
    """Return the checks that can confirm that this component of this node is bad.

    `partition` is that of the job that accuses it, None where nobody knows.
    """
    choices = choose(checks, context="retest", node=node, partition=partition)
    return [each for each in running(choices) if _tests(each.check, component)]


def _tests(check: Check, component: str) -> bool:
    # "node" says that something is wrong and not what.
    return component == "node" or component in check.COMPONENTS
