# SPDX-License-Identifier: Apache-2.0
"""Choose the checks that run here, and run them in parallel, in children that can be killed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.checks.check import CheckContext, NotApplicable, Planned
from slurm_health.node.rules.finding import (
    CheckResult,
    Finding,
    Status,
    capped,
    inconclusive,
    node_fault,
)
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
# A check that was ready to run at its deadline, and had not run for so large a share of its time,
# has not hung: it could not be measured.
_STARVED = 0.5


def node_name(environ: Mapping[str, str]) -> str:
    """Return this node's name from slurmd, else the host's own without its domain."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def why_not(planned: Planned, context: str, node: str, partition: str | None) -> str:
    """Return why a check does not run; empty if it does.

    Args:
        planned: the check.
        context: the hook.
        node: this node's name.
        partition: the job's; None if it is unknown, and checks for some partitions do not run.
    """
    partitions = " ".join(planned.partitions)
    if context not in planned.contexts:
        return f"runs in {', '.join(planned.contexts) or 'no hook'}"
    if not matches(node, planned.nodes):
        return f"for nodes {' '.join(planned.nodes)}, this is {node}"
    if partitions and partition is None:
        return f"for partitions {partitions}, and there is no job here"
    if partitions and not matches(str(partition), planned.partitions):
        return f"for partitions {partitions}, the job's is {partition}"
    return ""


def chosen(
    checks: Sequence[Planned], context: str, node: str, partition: str | None
) -> list[Planned]:
    """Return the checks for which `why_not` is empty."""
    return [check for check in checks if not why_not(check, context, node, partition)]


def confirming(
    checks: Sequence[Planned], component: str, node: str, partition: str | None = None
) -> list[Planned]:
    """Return the checks that can confirm that this component of this node is bad.

    The component `node` is an unknown one: every check can confirm it.
    """
    return [
        check
        for check in chosen(checks, "retest", node, partition)
        if component == "node" or component in check.check.COMPONENTS
    ]


def after_drain(place: CheckContext, drained: DrainRecord) -> CheckContext:
    """Return the context for a retest after a drain, with the job's variables of that time."""
    from slurm_health.node.rules.recovery import uptime_s

    return msgspec.structs.replace(
        place,
        environ={**place.environ, **drained.expected},
        drained_uptime_s=uptime_s(drained.measured, place.boot_time()),
    )


def run_checks(planned: Sequence[Planned], place: CheckContext) -> list[CheckResult]:
    """Run checks in parallel, at most a moment longer than the longest time limit.

    Checks that read a few files share children, because a child costs more than they do. If a
    shared child does not end in half of its checks' shortest limit, every check gets a child of its
    own for the rest of the time, and the one that hangs is named.

    A check whose last child is stuck in the kernel does not run.
    """
    held = recall_stuck(place.state)
    outcomes: dict[str, Finding | WorkResult | Stuck] = dict(held)
    elapsed_s: dict[str, float] = {}

    def run(groups: Sequence[Sequence[Planned]], spent_s: Mapping[str, float]) -> list[Planned]:
        """Run every group in a child; return the checks of shared children without an answer."""
        work = {}
        for number, group in enumerate(groups):
            limit_s = min(check.time_limit_s for check in group)
            limit_s = limit_s / 2 if len(group) > 1 else limit_s - spent_s.get(group[0].name, 0.0)
            work[number] = (_work(group, place), limit_s)
        unanswered: list[Planned] = []
        for number, outcome in run_all(work).items():
            group = groups[number]
            if isinstance(outcome, Answered):
                answers = from_msgpack(outcome.data, list[tuple[Finding, float]])
                for check, (finding, took_s) in zip(group, answers, strict=True):
                    outcomes[check.name], elapsed_s[check.name] = finding, took_s
            elif len(group) == 1:
                outcomes[group[0].name] = outcome
                if isinstance(outcome, Hung) and outcome.abandoned:
                    remember_stuck(place.state, group[0].name, outcome.abandoned)
            else:
                elapsed_s.update(dict.fromkeys((check.name for check in group), work[number][1]))
                unanswered += group
        return unanswered

    fresh = [check for check in planned if check.name not in held]
    again = run(_groups(fresh), {})
    if again:
        run([[check] for check in again], dict(elapsed_s))
    return [
        _result(check, outcomes[check.name], elapsed_s.get(check.name, 0.0)) for check in planned
    ]


def _groups(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Divide checks among children; those with the same reading share one.

    Reading all processes, or the kernel's log, takes longer than all other checks together.
    """
    families: dict[str, list[Planned]] = {}
    for check in planned:
        if check.check.TOGETHER:
            families.setdefault(check.check.READS or f"check {check.name}", []).append(check)
    shared = sorted(families.values(), key=lambda family: not family[0].check.READS)
    count = min(_MOST_SHARED, os.cpu_count() or 1, len(shared))
    groups: list[list[Planned]] = [[] for _ in range(count)]
    for family in shared:
        min(groups, key=len).extend(family)
    return groups + [[check] for check in planned if not check.check.TOGETHER]


def _work(group: Sequence[Planned], place: CheckContext) -> Work:
    """Return the work of a child: it returns the findings of these checks, and their times."""

    def work() -> bytes:
        machine = msgspec.structs.replace(place, shared={})
        timed = []
        for check in group:
            began_s = time.monotonic()
            timed.append((measure(check, machine), time.monotonic() - began_s))
        return msgspec.msgpack.encode(timed)

    return work


def measure(planned: Planned, machine: CheckContext) -> Finding:
    """Run one check here. What it raises says nothing of the node."""
    try:
        finding = planned.check.measure(machine)
    except NotApplicable as err:
        finding = Finding(status=Status.NOT_APPLICABLE, text=str(err))
    except Exception as err:
        finding = inconclusive(f"could not be measured: {str(err) or type(err).__name__}")
    # JSON has no word for a number that is not finite.
    figures = {
        name: value
        for name, value in finding.figures.items()
        if not isinstance(value, float) or math.isfinite(value)
    }
    return msgspec.structs.replace(finding, figures=figures)


def _result(planned: Planned, outcome: Finding | WorkResult | Stuck, took_s: float) -> CheckResult:
    judged = node_fault if planned.hang_is_fault else inconclusive
    match outcome:
        case Finding():
            finding = outcome
        case Stuck(pid=pid):
            finding = judged(f"not run: process {pid} of an earlier run waits in the kernel")
        case Hung(limit_s=limit_s, abandoned=abandoned, unserved_s=unserved_s):
            text, took_s = f"did not end within {planned.time_limit_s:g} s", planned.time_limit_s
            if unserved_s >= _STARVED * limit_s:
                wait = f"did not run for {unserved_s:.1f} s of the last {limit_s:g}"
                why = f"it was ready to run, and {wait}"
                finding = inconclusive(f"{text}: {why}")
            else:
                left = " and cannot be killed (its process waits in the kernel)"
                finding = judged(f"{text}{left if abandoned else ''}")
        case Broke(reason=reason, elapsed_s=took_s):
            finding = inconclusive(f"could not be measured: {reason}")
        case Answered():
            raise AssertionError("an answer is decoded where it arrives")
    # Users choose the names of processes and files, and the text reaches root's terminal.
    finding = msgspec.structs.replace(finding, text=one_line(finding.text))
    return CheckResult(
        name=planned.name,
        finding=capped(finding, planned.severity),
        elapsed_ms=round(took_s * 1000, 1),
        shadow=planned.shadow,
        hung=isinstance(outcome, Hung | Stuck),
    )
