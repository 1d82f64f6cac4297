# SPDX-License-Identifier: Apache-2.0
"""Run configured checks at once, each in a child, and judge what they saw."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

import msgspec

from slurm_health.checks.check import Check, Place
from slurm_health.core.check_result import CheckResult, Finding, Status, capped, inconclusive
from slurm_health.hooks.children import Answered, Broke, Hung, Outcome, Work, run_all

_MOST_SHARED = 4
_encoder = msgspec.msgpack.Encoder()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A check as a site wants it run.

    Args:
        name: the name of its table in the configuration.
        check: what to run.
        time_limit_s: after this it is killed, and inconclusive.
        severity: the worst its finding may be.
        shadow: its finding is logged and never acted on.
        contexts: where it runs.
        nodes: node patterns, empty for all.
        partitions: patterns of partitions, empty for all.
        line: where the configuration names it.
    """

    name: str
    check: Check
    time_limit_s: float
    severity: Status
    shadow: bool
    contexts: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    line: int = 0


def run_checks(planned: Sequence[Planned], place: Place) -> list[CheckResult]:
    """Run checks in parallel. Takes no longer than the longest time limit and a moment.

    Checks that look at a few files share children, because a child costs more than they do. Should
    one of those not end in half of its checks' shortest limit, each of its checks gets a child of
    its own for the rest of the time, and the one that hangs is named.
    """
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
    outcomes |= run_all(again)
    return [_result(each, outcomes[each.name]) for each in planned]


def _groups(shared: Sequence[Planned]) -> list[Sequence[Planned]]:
    """Divide checks among as many children as can run at once."""
    count = min(_MOST_SHARED, os.cpu_count() or 1, len(shared))
    return [shared[number::count] for number in range(count)]


def _shared_name(number: int) -> str:
    """Return a name that no check has."""
    return f" {number}"


def _shared_limit_s(group: Sequence[Planned]) -> float:
    return min(each.time_limit_s for each in group) / 2


def _work(check: Check, place: Place) -> Work:
    return lambda: _encoder.encode(check.collect(place))


def _shared_work(shared: Sequence[Planned], place: Place) -> Work:
    def work() -> bytes:
        parts: list[Answered | Broke] = []
        for each in shared:
            began_s = time.monotonic()
            try:
                data = _encoder.encode(each.check.collect(place))
                parts.append(Answered(data, time.monotonic() - began_s))
            except Exception as err:  # told by the parent, as for a child of its own
                reason = str(err) or type(err).__name__
                parts.append(Broke(reason, time.monotonic() - began_s))
        return _encoder.encode(parts)

    return work


def _parted(group: Sequence[Planned], shared: Answered) -> dict[str, Outcome]:
    parts = msgspec.msgpack.decode(shared.data, type=list[Answered | Broke])
    return {each.name: part for each, part in zip(group, parts, strict=True)}


def _result(planned: Planned, outcome: Outcome) -> CheckResult:
    finding = _finding(planned, outcome)
    elapsed_s = planned.time_limit_s if isinstance(outcome, Hung) else outcome.elapsed_s
    return CheckResult(
        name=planned.name,
        finding=capped(finding, planned.severity),
        elapsed_ms=round(elapsed_s * 1000, 1),
        shadow=planned.shadow,
        hung=isinstance(outcome, Hung),
    )


def _finding(planned: Planned, outcome: Outcome) -> Finding:
    match outcome:
        case Hung(abandoned=abandoned):
            left = " and cannot be killed (its process waits in the kernel)" if abandoned else ""
            return inconclusive(f"did not end within {planned.time_limit_s:g} s{left}")
        case Broke(reason=reason):
            return inconclusive(f"could not be measured: {reason}")
        case Answered(data=data):
            return _judged(planned.check, data)


def _judged(check: Check, data: bytes) -> Finding:
    try:
        finding = check.judge(msgspec.msgpack.decode(data, type=check.SEEN))
    except Exception as err:  # a check from elsewhere must not end the hook
        return inconclusive(f"could not be judged: {type(err).__name__}: {err}")
    figures = {name: value for name, value in finding.figures.items() if _is_plain(value)}
    return Finding(status=finding.status, text=finding.text, figures=figures)


def _is_plain(value: object) -> bool:
    """Tell whether a figure can be written as JSON."""
    return not isinstance(value, float) or math.isfinite(value)
