# SPDX-License-Identifier: Apache-2.0
"""What the health check of a drained node does to mend it: the next step, or none, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.node import notify
from slurm_health.node.draining.shared_state import SharedStateUnusable
from slurm_health.node.mending import ledger, perform, quarantine
from slurm_health.node.mending.ledger import HealthCheck
from slurm_health.node.mending.whose import NotOurs, require_ours, why_not_now
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import drain_note, mending
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.mending import MendStep, NextStep, StepOutcome, Tried
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.parsing import Node

_AWAY = ("DOWN", "REBOOT", "NOT_RESP", "POWER")


def consider(
    check: HealthCheck, kept: DrainRecord, now: Node, failed: Sequence[CheckResult]
) -> None:
    """Take the next step for a node that we have drained and that is faulty still.

    Args:
        check: the health check.
        kept: what the node was drained for.
        now: how Slurm sees it.
        failed: the node faults that its checks have found just now, of those it was drained for;
            empty where no check can tell.
    """
    why_not = why_not_now(now, kept.reason)
    if why_not:
        check.log.info(f"nothing is done to mend it: {why_not}")
        return
    try:
        if failed:
            _judge_last(check, kept, failed)
        else:
            done(check, kept)
        chosen, begun = _choose(check, kept, now, failed)
        if begun is None:
            check.log.info(f"nothing is done to mend it: {chosen.why}")
        elif begun.outcome is StepOutcome.DRY_RUN:
            check.log.info(f"dry run: would be mended by {begun.step.value}: {chosen.why}")
        else:
            check.log.info(f"mending: {begun.step.value}: {chosen.why}")
            _begin(check, kept, begun, failed)
    except SharedStateUnusable as err:
        check.log.warning(f"nothing more is done to mend it: {err}")


def burn_in(check: HealthCheck, kept: DrainRecord, now: Node) -> bool:
    """Have a node that is due to come back tested for long first; tell whether it waits for that.

    Where such a test cannot be begun, the node comes back: it has passed what it was drained for.
    """
    settings = check.site.mend
    is_ours = now.drained and drain_note.unsigned(now.reason) == kept.reason
    if not mending.burns_in(settings) or not is_ours:
        return False
    why_not = why_not_now(now, kept.reason)
    if why_not:
        check.log.info(f"not released: it waits for its burn-in: {why_not}")
        return True
    try:
        return _begin_burn_in(check, kept, now)
    except SharedStateUnusable as err:
        check.log.warning(f"it comes back without its burn-in: {err}")
        return False


def _begin_burn_in(check: HealthCheck, kept: DrainRecord, now: Node) -> bool:
    settings, now_s = check.site.mend, check.context.now_s

    def choose(tried: tuple[Tried, ...]) -> tuple[NextStep, Tried | None]:
        chosen = mending.next_burn_in(tried, settings, now_s)
        if chosen.step is None or settings.dry_run:
            return chosen, None
        until_s = now_s + 3600 * settings.burn_in_h + 60 * settings.deep_test_min
        return chosen, _tried(kept, chosen.step, now_s, until_s=until_s, text="its burn-in")

    chosen, begun = ledger.reserve(check.site, kept.node, now.partitions, choose)
    if begun is None:
        waits = "not released: it waits for its burn-in"
        said = waits if chosen.step is None else "dry run: would be tested first"
        check.log.info(f"{said}: {chosen.why}")
        return chosen.step is None
    try:
        quarantine.begin(
            check.site,
            kept,
            begun,
            check.maintenance(),
            environ=check.context.environ,
            hours=settings.burn_in_h,
        )
    except NotOurs as err:
        _not_taken(check, begun, err)
        return True
    except (SlurmError, OSError, quarantine.NotBegun) as err:
        ledger.fail(check, begun, f"it could not be begun: {err}")
        return False
    check.log.info(f"burn-in: {chosen.why}")
    return True


def _tried(kept: DrainRecord, step: MendStep, now_s: float, *, until_s: float, text: str) -> Tried:
    return Tried(
        node=kept.node, step=step, time_s=now_s, drain=kept.reason, until_s=until_s, text=text
    )


def _judge_last(check: HealthCheck, kept: DrainRecord, failed: Sequence[CheckResult]) -> None:
    """Note that the last step has not helped, now that the fault is there still."""
    last = mending.unfinished(ledger.read(check.site), kept.node, kept.reason)
    if last is None:
        return
    # A reboot is over when Slurm has the node back, idle, as it has now.
    is_over = last.outcome is StepOutcome.DONE or last.step is MendStep.REBOOT
    if not is_over and check.context.now_s < last.until_s:
        return
    found = "; ".join(each.finding.text for each in failed)
    why = f"the fault is still there: {found}" if is_over else "it did not end in time"
    ledger.fail(check, last, why)


def _choose(
    check: HealthCheck, kept: DrainRecord, now: Node, failed: Sequence[CheckResult]
) -> tuple[NextStep, Tried | None]:
    settings, now_s = check.site.mend, check.context.now_s
    first = mending.first_step(failed, settings)

    def choose(tried: tuple[Tried, ...]) -> tuple[NextStep, Tried | None]:
        chosen = mending.next_step(first, tried, kept.node, kept.reason, settings, now_s)
        if chosen.step is None:
            return chosen, None
        minutes = settings.limit_min
        if chosen.step is MendStep.DEEP_TEST:
            minutes = settings.deep_test_min
        text = "; ".join(each.finding.text for each in failed)
        new = _tried(kept, chosen.step, now_s, until_s=now_s + 60 * minutes, text=text)
        outcome = StepOutcome.DRY_RUN if settings.dry_run else StepOutcome.BEGUN
        return chosen, msgspec.structs.replace(new, outcome=outcome)

    return ledger.reserve(check.site, kept.node, now.partitions, choose)


def _begin(
    check: HealthCheck, kept: DrainRecord, begun: Tried, failed: Sequence[CheckResult]
) -> None:
    try:
        match begun.step:
            case MendStep.RESET | MendStep.RELOAD:
                devices = [each.finding.devices for each in failed]
                known = all(devices)  # where one is not known, all GPUs are reset
                named = dict.fromkeys(bus for each in devices for bus in each) if known else {}
                perform.start(check.site, begun, tuple(named), check.context.environ)
            case MendStep.REBOOT:
                controller = check.maintenance()
                require_ours(controller.node(kept.node), kept.reason)
                controller.reboot(kept.node, kept.reason)
            case MendStep.DEEP_TEST:
                environ = check.context.environ
                quarantine.begin(check.site, kept, begun, check.maintenance(), environ=environ)
            case MendStep.TICKET:
                _ticket(check, kept, begun, failed)
    except NotOurs as err:
        _not_taken(check, begun, err)
    except (SlurmError, OSError, quarantine.NotBegun) as err:
        ledger.fail(check, begun, f"it could not be begun: {err}")


def _not_taken(check: HealthCheck, begun: Tried, why: NotOurs) -> None:
    """Keep that a step was not taken, for somebody has been quicker. Nobody needs to be told."""
    ended = msgspec.structs.replace(begun, outcome=StepOutcome.FAILED, text=str(why))
    ledger.keep(check.site, ended)
    check.log.info(f"nothing is done to mend it: {why}")


def _ticket(
    check: HealthCheck, kept: DrainRecord, begun: Tried, failed: Sequence[CheckResult]
) -> None:
    """Hand a node over to people, with all that is known of it."""
    steps = mending.latest(ledger.read(check.site), check.context.now_s).get(kept.node, [])
    evidence = [f"drained with: {kept.reason}"]
    evidence += [f"check {each.name}: {each.finding.text}" for each in failed]
    evidence += [
        f"{each.step.value} at {each.time_s:.0f}: {each.outcome.value}: {each.text}"
        for each in steps
        if each.step is not MendStep.TICKET
    ]
    text = "; ".join(each.finding.text for each in failed) or kept.reason
    ledger.tell(check, EventKind.TICKET, text, kept.retest, tuple(evidence))
    ledger.keep(check.site, msgspec.structs.replace(begun, outcome=StepOutcome.DONE))


def report_missing(check: HealthCheck) -> None:
    """Have it told of any node that is not back in time from a reboot, or from quarantine.

    It may be unable to do so itself: it is down, or has lost what it kept.
    """
    try:
        overdue = mending.overdue(ledger.read(check.site), check.context.now_s)
        nodes = check.maintenance().nodes() if overdue else {}
        for late in overdue:
            now = nodes.get(late.node)  # one that Slurm does not know any more is not back either
            back = now is not None and not _is_away(now)
            if now is not None and late.step is MendStep.DEEP_TEST:
                back = back and not now.out_of_pool
            _report(check, late, back=back)
    except (SlurmError, SharedStateUnusable) as err:
        check.log.warning(f"whether nodes are back from their reboots is not known: {err}")


def _is_away(now: Node) -> bool:
    return any(word.startswith(_AWAY) for word in now.states) or "*" in now.state


def _report(check: HealthCheck, late: Tried, *, back: bool) -> None:
    from_ = "its reboot"
    if late.step is MendStep.DEEP_TEST:
        name = quarantine.reservation_of(late.node)
        from_ = f"quarantine: scontrol show reservation {name}"
    why = "it is back" if back else f"{late.node} is not back from {from_}"
    outcome = StepOutcome.DONE if back else StepOutcome.FAILED
    ledger.keep(check.site, msgspec.structs.replace(late, outcome=outcome, text=why))
    if back:
        return
    check.log.warning(f"mending: {why}")
    for kind in (EventKind.STEP_FAILED, EventKind.TICKET):
        event = NodeEvent(
            kind=kind,
            node=late.node,
            time_s=check.context.now_s,
            text=why,
            checks=(late.step.value,),
            evidence=(f"drained with: {late.drain}",),
        )
        notify.send(check.site, event)


def done(check: HealthCheck, kept: DrainRecord) -> None:
    """Note that the last step has helped: the checks that the node was drained for pass."""
    try:
        last = mending.unfinished(ledger.read(check.site), kept.node, kept.reason)
        if last is not None and last.outcome is StepOutcome.BEGUN and last.step is MendStep.REBOOT:
            ended = msgspec.structs.replace(last, outcome=StepOutcome.DONE, text="it is back")
            ledger.keep(check.site, ended)
    except SharedStateUnusable as err:
        check.log.warning(f"how the last step ended is not kept: {err}")
