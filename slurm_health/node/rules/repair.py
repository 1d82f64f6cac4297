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
    """The step to take, None for none; and why."""

    step: RepairStep | None
    why: str


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


def next_repair(
    first: RepairStep,
    attempts: Iterable[RepairAttempt],
    *,
    node: str,
    drain: str,
    settings: Repair,
    now_s: float,
) -> NextStep:
    """Return the next step for a node that is still faulty, or that no check of its own can clear.

    Args:
        first: the first step for its faults.
        attempts: the steps of all nodes.
        node: its name.
        drain: the note that it is drained with.
        settings: the site's.
        now_s: the time.
    """
    attempts = tuple(attempts)
    of_node = [a for a in attempts if a.node == node and abs(now_s - a.time_s) < _DAY_S]
    for attempt in of_node:
        if attempt.drain != drain:
            continue
        if attempt.is_under_way(now_s):
            return NextStep(step=None, why=f"{attempt.step.value} is under way")
        if attempt.outcome is Outcome.DRY_RUN:
            return NextStep(step=None, why="dry run: nothing is done")
        if attempt.step is RepairStep.ADMINISTRATOR:
            return NextStep(step=None, why="it waits for an administrator")
    taken = [attempt.step for attempt in of_node if attempt.outcome is not Outcome.DRY_RUN]
    allowed = [step for step in LADDER[LADDER.index(first) :] if step.value in settings.steps]
    left = [step for step in allowed if step not in taken]
    if not left:
        return NextStep(step=None, why="no step that the site allows is left")
    in_hour = [
        attempt
        for attempt in attempts
        if abs(now_s - attempt.time_s) < _HOUR_S
        and attempt.step in (RepairStep.RESET, RepairStep.REBOOT)
        and attempt.outcome is not Outcome.DRY_RUN
    ]
    if left[0] is not RepairStep.ADMINISTRATOR and len(in_hour) >= _MOST_PER_HOUR:
        why = f"{counted(len(in_hour), 'step')} within the hour, the limit for all nodes"
        return NextStep(step=None, why=why)
    before = ", ".join(step.value for step in taken)
    return NextStep(
        step=left[0], why=f"after {before}" if before else "the first step for this fault"
    )


class Gate(Enum):
    """Whether a node that passes its checks may return to service."""

    OPEN = "open"
    TEST_NEEDED = "test needed"
    TESTING = "testing"
    TEST_FAILED = "test failed"


def gate(
    attempts: Iterable[RepairAttempt], *, node: str, drain: str, settings: Repair, now_s: float
) -> tuple[Gate, RepairAttempt | None]:
    """Return whether a node may return to service, and the test that decides it.

    Without a test of the site's, it may. A test that was cut off, as by a reboot, is begun again
    once; the second time it counts as failed.
    """
    if not settings.test:
        return Gate.OPEN, None
    tests = [a for a in attempts if (a.node, a.drain, a.step) == (node, drain, RepairStep.TEST)]
    if not tests:
        return Gate.TEST_NEEDED, None
    last = max(tests, key=lambda attempt: attempt.time_s)
    if last.is_under_way(now_s):
        return Gate.TESTING, last
    if last.outcome is Outcome.DONE:
        return Gate.OPEN, last
    if last.outcome is Outcome.BEGUN and len(tests) == 1:
        return Gate.TEST_NEEDED, last
    return Gate.TEST_FAILED, last


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


def unfinished(attempts: Iterable[RepairAttempt], node: str, drain: str) -> RepairAttempt | None:
    """Return the last repair for this drain, until it is known whether it helped."""
    repairs = [
        attempt
        for attempt in attempts
        if (attempt.node, attempt.drain) == (node, drain) and attempt.step is not RepairStep.TEST
    ]
    last = max(repairs, key=lambda attempt: attempt.time_s, default=None)
    if last is None or last.step is RepairStep.ADMINISTRATOR:
        return None
    return last if last.outcome in (Outcome.BEGUN, Outcome.DONE) else None


def of_last_day(
    attempts: Iterable[RepairAttempt], now_s: float
) -> Mapping[str, list[RepairAttempt]]:
    """Return the attempts of the last day, by node, the oldest first."""
    by_node: dict[str, list[RepairAttempt]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.time_s):
        if abs(now_s - attempt.time_s) < _DAY_S:
            by_node.setdefault(attempt.node, []).append(attempt)
    return by_node
