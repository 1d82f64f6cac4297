# SPDX-License-Identifier: Apache-2.0
"""Which step mends a node next, if any. Pure.

The steps are a ladder: a fault begins at the one that is known to mend it, and goes on to the next
that the site allows when it is still there, or comes back within a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from slurm_health.node.rules.finding import CheckResult, common_remedy
from slurm_health.node.rules.settings import Mend
from slurm_health.records.text import counted

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_KEPT_S = 7 * _DAY_S
_MOST = 1000


class MendStep(Enum):
    """What can be done, from the least to the last."""

    RESET = "reset"
    RELOAD = "reload"
    REBOOT = "reboot"
    DEEP_TEST = "deep_test"
    TICKET = "ticket"


class StepOutcome(Enum):
    """How far a step has come."""

    BEGUN = "begun"
    DONE = "done"  # whether it helped, the node's checks tell
    FAILED = "failed"
    DRY_RUN = "dry_run"


class Tried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of one node: for which drain (its note), since when, how it ended, and why.

    Where it has begun, `until_s` is when it has to be over.
    """

    node: str
    step: MendStep
    time_s: float
    drain: str
    outcome: StepOutcome = StepOutcome.BEGUN
    until_s: float = 0.0
    text: str = ""

    @property
    def key(self) -> tuple[str, MendStep, float]:
        """What tells it from others."""
        return self.node, self.step, self.time_s


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step to take, None for none; and why."""

    step: MendStep | None
    why: str


def first_step(failed: Sequence[CheckResult], settings: Mend) -> MendStep:
    """Return the step that the faults of a node begin with.

    The site's word for a check goes first; what neither it nor the check knows a remedy for is a
    person's. Of several faults, the one that needs most decides: a reset that mends one of two
    must not make the other forgotten.
    """
    if not failed:  # drained for what no check of the node can tell, as for marks
        return MendStep.DEEP_TEST
    named = [MendStep(settings.first[each.name]) for each in failed if each.name in settings.first]
    others = [each.finding for each in failed if each.name not in settings.first]
    if others:
        remedy = common_remedy(others)
        named.append(MendStep(remedy.value) if remedy is not None else MendStep.TICKET)
    return max(named, key=list(MendStep).index)


def next_step(
    first: MendStep, tried: Iterable[Tried], node: str, drain: str, settings: Mend, now_s: float
) -> NextStep:
    """Return the next step of a node that is faulty still.

    Args:
        first: what its faults begin with.
        tried: the steps of all nodes.
        node: its name.
        drain: the note that it is drained with.
        settings: the site's.
        now_s: the time.
    """
    tried = tuple(tried)
    # A day from its end: one that a burn-in has failed must not come back by a short test.
    of_node = [
        each
        for each in tried
        if each.node == node
        and (abs(now_s - each.time_s) < _DAY_S or each.time_s <= now_s < each.until_s + _DAY_S)
    ]
    of_drain = [each for each in of_node if each.drain == drain]
    for each in of_drain:
        if each.outcome is StepOutcome.BEGUN and now_s < each.until_s:
            return NextStep(step=None, why=f"{each.step.value} is under way")
        if each.outcome is StepOutcome.DRY_RUN:
            return NextStep(step=None, why="dry run: nothing is done")
        if each.step is MendStep.TICKET:
            return NextStep(step=None, why="it waits for a person")
    ladder = list(MendStep)[list(MendStep).index(first) :]
    done = [each for each in of_node if each.outcome is not StepOutcome.DRY_RUN]
    left = [
        step
        for step in ladder
        if step.value in settings.steps
        and sum(each.step is step for each in done) < settings.per_day
    ]
    if not left:
        return NextStep(step=None, why="no step that the site allows is left")
    step = left[0]
    full = "" if step is MendStep.TICKET else _full_hour(tried, settings, now_s)
    if full:
        return NextStep(step=None, why=full)
    before = ", ".join(each.step.value for each in done)
    return NextStep(step=step, why=f"after {before}" if before else "the first step for this fault")


def next_burn_in(tried: Iterable[Tried], settings: Mend, now_s: float) -> NextStep:
    """Return whether a node that has passed its checks is tested for long now, and why not."""
    full = _full_hour(tried, settings, now_s)
    if full:
        return NextStep(step=None, why=full)
    return NextStep(
        step=MendStep.DEEP_TEST, why=f"for {settings.burn_in_h:g} h before it comes back"
    )


def burns_in(settings: Mend) -> bool:
    """Tell whether a node that passes its checks is tested for long before it comes back."""
    return (
        settings.enabled and MendStep.DEEP_TEST.value in settings.steps and settings.burn_in_h > 0
    )


def _full_hour(tried: Iterable[Tried], settings: Mend, now_s: float) -> str:
    """Return why no step is taken on any node now; empty where one may be."""
    in_hour = [
        each
        for each in tried
        if abs(now_s - each.time_s) < _HOUR_S
        and each.step is not MendStep.TICKET
        and each.outcome is not StepOutcome.DRY_RUN
    ]
    if settings.dry_run or len(in_hour) < settings.per_hour:
        return ""
    return f"{counted(len(in_hour), 'step')} within the hour, the limit for all nodes"


def with_tried(tried: Iterable[Tried], new: Tried) -> tuple[Tried, ...]:
    """Return the steps with one more, or with how one has ended; without those of long ago."""
    others = [
        each for each in tried if each.key != new.key and abs(new.time_s - each.time_s) < _KEPT_S
    ]
    return (*others, new)[-_MOST:]


def unfinished(tried: Iterable[Tried], node: str, drain: str) -> Tried | None:
    """Return the last step for this drain, where it is not known yet whether it helped."""
    mine = [each for each in tried if (each.node, each.drain) == (node, drain)]
    last = max(mine, key=lambda each: each.time_s, default=None)
    open_ = last is not None and last.outcome in (StepOutcome.BEGUN, StepOutcome.DONE)
    return last if open_ and last is not None and last.step is not MendStep.TICKET else None


def overdue(tried: Iterable[Tried], now_s: float) -> list[Tried]:
    """Return the reboots and quarantines that are not over in time: their nodes may not say so.

    The job of a quarantine may have had to wait before it began.
    """
    more_s = {MendStep.REBOOT: 0.0, MendStep.DEEP_TEST: _HOUR_S}
    return [
        each
        for each in tried
        if each.outcome is StepOutcome.BEGUN
        and each.step in more_s
        and now_s > each.until_s + more_s[each.step]
    ]


def latest(tried: Iterable[Tried], now_s: float) -> Mapping[str, list[Tried]]:
    """Return the steps of the last day, by node, the oldest first."""
    found: dict[str, list[Tried]] = {}
    for each in sorted(tried, key=lambda step: step.time_s):
        if abs(now_s - each.time_s) < _DAY_S:
            found.setdefault(each.node, []).append(each)
    return found
