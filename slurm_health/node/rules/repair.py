# SPDX-License-Identifier: Apache-2.0
"""The next step to repair a drained node. Pure.

The steps are a ladder: reset of the GPUs, reboot, an administrator. A fault starts at the step that
is known to repair it. If the fault persists, or comes back within a day, the next step follows that
the site allows. A node that passes its checks again may have to pass the site's own test, in place,
before it returns to service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from slurm_health.node.rules.finding import CheckResult, common_remedy
from slurm_health.node.rules.settings import Repair
from slurm_health.records.text import counted

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_KEPT_S = 7 * _DAY_S
_MOST_KEPT = 1000
# Steps on all nodes within an hour: more broken nodes have a common cause.
_MOST_PER_HOUR = 4
# A reset, and the time in which a node has to be back from a reboot.
STEP_LIMIT_S = 1800.0


class RepairStep(Enum):
    """The steps, from the least to the last; `TEST` repairs nothing, and is a gate."""

    RESET = "reset"
    REBOOT = "reboot"
    ADMINISTRATOR = "administrator"
    TEST = "test"


LADDER = (RepairStep.RESET, RepairStep.REBOOT, RepairStep.ADMINISTRATOR)


class Outcome(Enum):
    """The state of a step."""

    BEGUN = "begun"
    DONE = "done"  # of a test: passed; the node's checks decide whether a repair helped
    FAILED = "failed"
    DRY_RUN = "dry_run"


class RepairAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step on one node, for the drain with this note.

    Args:
        node: its name.
        step: the step.
        time_s: when it began.
        drain: the note that the node was drained with.
        outcome: the state of the step.
        until_s: its deadline.
        text: why it was begun, or how it ended.
    """

    node: str
    step: RepairStep
    time_s: float
    drain: str
    outcome: Outcome = Outcome.BEGUN
    until_s: float = 0.0
    text: str = ""

    def is_under_way(self, now_s: float) -> bool:
        """Return whether it may still come to an end by itself."""
        return self.outcome is Outcome.BEGUN and now_s < self.until_s


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step to take, None for none; and why. `is_open`: the node may return to service."""

    step: RepairStep | None
    why: str
    is_open: bool = False


def first_step(failed: Sequence[CheckResult], settings: Repair) -> RepairStep:
    """Return the first step for the faults of a node.

    The site's setting for a check comes first; a fault without a known remedy is an
    administrator's, and so is a node that no check can clear. Of several faults, the one that needs
    most decides: a reset that repairs one of two must not hide the other.
    """
    first = settings.first
    steps = [RepairStep(first[result.name]) for result in failed if result.name in first]
    others = [result.finding for result in failed if result.name not in first]
    if others or not failed:
        remedy = common_remedy(others)
        steps.append(RepairStep(remedy.value) if remedy else RepairStep.ADMINISTRATOR)
    return max(steps, key=LADDER.index)


def next_step(
    first: RepairStep,
    attempts: Sequence[RepairAttempt],
    *,
    node: str,
    drain: str,
    settings: Repair,
    now_s: float,
) -> NextStep:
    """Return the next step for a drained node.

    Args:
        first: the first step for its faults; TEST if its checks pass.
        attempts: the steps of all nodes.
        node: its name.
        drain: the note that it is drained with.
        settings: the site's.
        now_s: the time.
    """
    of_drain = [attempt for attempt in attempts if (attempt.node, attempt.drain) == (node, drain)]
    if first is RepairStep.TEST:
        return _next_test(of_drain, settings, now_s)
    recent = [attempt for attempt in attempts if abs(now_s - attempt.time_s) < _DAY_S]
    for attempt in of_drain:
        if attempt.is_under_way(now_s):
            return NextStep(step=None, why=f"{attempt.step.value} is under way")
        if attempt in recent and attempt.outcome is Outcome.DRY_RUN:
            return NextStep(step=None, why="dry run: nothing is done")
        if attempt in recent and attempt.step is RepairStep.ADMINISTRATOR:
            return NextStep(step=None, why="it waits for an administrator")
    done = [attempt for attempt in recent if attempt.outcome is not Outcome.DRY_RUN]
    taken = [attempt.step for attempt in done if attempt.node == node]
    allowed = [step for step in LADDER[LADDER.index(first) :] if step.value in settings.steps]
    step = next((step for step in allowed if step not in taken), None)
    if step is None:
        return NextStep(step=None, why="no step that the site allows is left")
    in_hour = sum(
        now_s - attempt.time_s < _HOUR_S and attempt.step in (RepairStep.RESET, RepairStep.REBOOT)
        for attempt in done
    )
    if step is not RepairStep.ADMINISTRATOR and in_hour >= _MOST_PER_HOUR:
        why = f"{counted(in_hour, 'step')} within the hour, the limit for all nodes"
        return NextStep(step=None, why=why)
    before = ", ".join(step.value for step in taken)
    return NextStep(step=step, why=f"after {before}" if before else "the first step for this fault")


def _next_test(of_drain: Sequence[RepairAttempt], settings: Repair, now_s: float) -> NextStep:
    """Return whether a node that passes its checks may return, or has to pass the site's test.

    A test that was cut off, as by a reboot, is begun again once; the second time it has failed.
    """
    tests = [attempt for attempt in of_drain if attempt.step is RepairStep.TEST]
    last = max(tests, key=lambda attempt: attempt.time_s, default=None)
    if not settings.test or (last is not None and last.outcome is Outcome.DONE):
        return NextStep(step=None, why="", is_open=True)
    if last is not None and last.is_under_way(now_s):
        return NextStep(step=None, why="the test of [repair] is running")
    if last is None or (last.outcome is Outcome.BEGUN and len(tests) == 1):
        return NextStep(step=RepairStep.TEST, why="its checks pass: the test of [repair] begins")
    why = last.text if last.outcome is Outcome.FAILED else "it did not end, twice"
    called = any(attempt.step is RepairStep.ADMINISTRATOR for attempt in of_drain)
    step = None if called else RepairStep.ADMINISTRATOR
    return NextStep(step=step, why=f"the test of [repair] failed: {why}")


def ended(
    attempts: Iterable[RepairAttempt], node: str, drain: str, faults: str, now_s: float
) -> RepairAttempt | None:
    """Return how the last repair for a drain has ended; None if it has not, or that is known.

    A reboot is over when Slurm has the node back, idle, as it has now.

    Args:
        attempts: the steps of all nodes.
        node: its name.
        drain: the note that it is drained with.
        faults: what its checks have just measured; empty if they pass.
        now_s: the time.
    """
    repairs = [
        attempt
        for attempt in attempts
        if (attempt.node, attempt.drain) == (node, drain) and attempt.step in LADDER
    ]
    last = max(repairs, key=lambda attempt: attempt.time_s, default=None)
    if last is None or last.step is RepairStep.ADMINISTRATOR:
        return None
    is_over = last.outcome is Outcome.DONE or last.step is RepairStep.REBOOT
    match last.outcome:
        case Outcome.BEGUN if not faults and is_over:
            return with_outcome(last, Outcome.DONE, "it is back")
        case Outcome.BEGUN | Outcome.DONE if faults and is_over:
            return with_outcome(last, Outcome.FAILED, f"the fault is still there: {faults}")
        case Outcome.BEGUN if faults and now_s >= last.until_s:
            return with_outcome(last, Outcome.FAILED, "it did not end in time")
    return None


def with_outcome(attempt: RepairAttempt, outcome: Outcome, text: str) -> RepairAttempt:
    """Return an attempt with how it ended."""
    return msgspec.structs.replace(attempt, outcome=outcome, text=text)


def with_attempt(
    attempts: Iterable[RepairAttempt], new: RepairAttempt
) -> tuple[RepairAttempt, ...]:
    """Return the attempts of a week with one added or updated."""
    key = (new.node, new.step, new.time_s)
    others = [
        attempt
        for attempt in attempts
        if (attempt.node, attempt.step, attempt.time_s) != key
        and abs(new.time_s - attempt.time_s) < _KEPT_S
    ]
    return (*others, new)[-_MOST_KEPT:]


def of_last_day(
    attempts: Iterable[RepairAttempt], now_s: float
) -> Mapping[str, list[RepairAttempt]]:
    """Return the attempts of the last day, by node, the oldest first."""
    by_node: dict[str, list[RepairAttempt]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.time_s):
        if abs(now_s - attempt.time_s) < _DAY_S:
            by_node.setdefault(attempt.node, []).append(attempt)
    return by_node
