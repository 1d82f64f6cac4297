# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and bring back what we drained.

On a node that is well, and that we did not drain, Slurm is asked nothing. On one that we did drain,
it is asked whether the drain is still ours.

When each node's last health check ran, and how it ended, is kept where all nodes can see it: one
file per node, so that no lock is needed. A node that is well leaves nothing else behind.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from slurm_health.node import state
from slurm_health.node.checks.check import Planned
from slurm_health.node.hooks.hook import Hook
from slurm_health.node.rules.finding import WELL, CheckResult, Status, node_faults
from slurm_health.node.rules.recovery import DrainRecord, after_test, is_due
from slurm_health.node.site import Site, keep_last_good
from slurm_health.node.store import held
from slurm_health.records.decoding import from_json
from slurm_health.records.text import counted, cut
from slurm_health.system.killable import run_guarded

if TYPE_CHECKING:
    from slurm_health.node.repair import Repairs

# Of the 36 s in which a health check asks Slurm (`hooks.__main__`): a node is returned within them.
LONGEST_REPEAT_S = 30.0
# In this node's own directory, and held while a health check is at work there.
LOCK = "healthcheck.lock"
HEALTH_FILE = "health.json"  # beside it
# Three times the interval of health checks that docs/admin/install.md sets.
HEALTH_VALID_S = 900
_LAST_CHECKS = "checked"  # in the directory that all nodes share
_KEEP_LIMIT_S = 2.0
_TEXT_LENGTH = 500
_DAY_S = 86_400.0


def run(hook: Hook) -> bool:
    """Run the health check; return whether the node has a proven fault.

    slurmd starts one when it is told to, whether or not the one before has ended. On a node that is
    slow, each would make the others slower, so all but the first end at once.
    """
    with contextlib.ExitStack() as stack:
        try:
            free = stack.enter_context(held(hook.site.state / LOCK))
        except OSError:  # a full or broken disk hides no fault
            free = True
        if free:
            return _run(hook)
    hook.not_checked = "an earlier health check is still running"
    hook.log.info(f"nothing is checked: {hook.not_checked}")
    return False


def _run(hook: Hook) -> bool:
    repairs = bool(hook.site.repair.steps or hook.site.repair.test)
    if repairs:
        from slurm_health.node.repair import is_at_work

        if is_at_work(hook.site.state):
            hook.not_checked = "a step to repair it is under way"
            hook.log.info(f"{hook.not_checked}: nothing is checked")
            return False
        _repairs(hook).report_missing()
    keep_last_good(hook.site)
    if hook.site.trouble:
        _report_trouble(hook)
    hook.was_returned()
    results = hook.check()
    faults = node_faults(results)
    publish_health(hook.site, results, node=hook.node, now_s=hook.context.now_s)
    kept = state.recall(hook.site.state, hook.node)
    if kept is not None:
        _recover(hook, kept, no_fault=not faults)
        if faults and hook.held_by:
            hook.log.info(f"already out of the pool: {hook.held_by}")
    elif faults:
        hook.drain(hook.cause(faults))
    ended = last_check_of(results, node=hook.node, now_s=hook.context.now_s)
    record = state.recall(hook.site.state, hook.node)
    if record is not None:
        ended = msgspec.structs.replace(
            ended,
            passes=record.passes,
            recorded=True,
            needs="" if record.retest else "an administrator has to release it",
        )
    keep_last_check(hook.site, msgspec.structs.replace(ended, trouble=hook.site.trouble))
    if hook.site.metrics.directory:
        from slurm_health.node.hooks import metrics  # which few sites have

        drained = state.recall(hook.site.state, hook.node) is not None
        now_s, node = hook.context.now_s, hook.node
        metrics.keep(hook.site, results, node=node, now_s=now_s, drained=drained)
    return bool(faults)


def _repairs(hook: Hook) -> Repairs:
    from slurm_health.node.repair import Repairs  # few sites repair, and few nodes need it

    return Repairs(hook.site, hook.node, hook.context, say=hook.log.say, controller=hook.controller)


def _report_trouble(hook: Hook) -> None:
    """Notify that the config file cannot be used: the first node that meets it, once a day."""
    from slurm_health.node import notify, shared
    from slurm_health.node.rules.breaker import DrainLedger

    trouble, now_s = hook.site.trouble, hook.context.now_s

    def change(ledger: DrainLedger) -> tuple[DrainLedger, bool]:
        text, time_s = ledger.reported
        is_new = text != trouble or abs(now_s - time_s) > _DAY_S
        reported = (trouble, now_s) if is_new else ledger.reported
        return msgspec.structs.replace(ledger, reported=reported), is_new

    try:
        is_new = shared.change_ledger(hook.site, change, bool)
    except shared.StoreUnusable as err:
        hook.log.warning(f"not notified of the config file: {err}")
        return
    if is_new:
        event = notify.NodeEvent(
            kind=notify.EventKind.UNCHECKED, node=hook.node, time_s=now_s, text=trouble
        )
        notify.send(hook.site, event)


def _recover(hook: Hook, kept: DrainRecord, *, no_fault: bool) -> None:
    """Test again what this node was drained for; after enough passes, return it to service."""
    settings, directory = hook.site.recovery, hook.site.state
    again = _test_again(hook, kept) if no_fault else []
    passes = bool(again) and all(result.status is Status.PASS for result in again)
    after = after_test(kept, all_passed=passes, now_s=hook.context.now_s, settings=settings)
    if after != kept:
        state.amend(directory, kept, after)
    if after.passes > kept.passes:
        hook.log.info(f"pass {after.passes} of {settings.passes} of {', '.join(kept.retest)}")
    now, steps, test = hook.seen_by_slurm, hook.site.repair.steps, hook.site.repair.test
    is_ours = now is not None and state.recall(directory) is not None
    # What no check of this node can clear, the site's own test may.
    only_test = no_fault and not kept.retest and bool(test) and bool(settings.passes)
    due = is_due(after, settings) or (only_test and is_ours)
    if now is not None and (steps or test) and (due or is_ours):
        repairs, faults = _repairs(hook), [*node_faults(hook.found), *node_faults(again)]
        if due or passes:
            repairs.end_reboot(kept)
        elif steps and (faults or not kept.retest):
            repairs.consider(kept, now, faults)
        due = due and repairs.may_return(after, now)
    if due:
        from slurm_health.node import drain

        hook.log.info(drain.release_own(hook.site, after, hook.controller()))


def _test_again(hook: Hook, kept: DrainRecord) -> list[CheckResult]:
    """Run the checks that the node was drained for; none where one of them cannot be run.

    One that the configuration no longer has cannot pass: then a person decides.
    """
    checks: list[Planned] = []
    for name in kept.retest:
        planned = hook.site.named(name)
        if planned is None:
            hook.log.warning(
                f"drained for {name}, which is no longer configured: once the node is well,"
                f" run slurm-health nodes release {hook.node}"
            )
            return []
        if planned.time_limit_s > LONGEST_REPEAT_S:
            hook.log.info(
                f"drained for {name}, which may take {planned.time_limit_s:g} s, longer than a"
                " health check: slurm-health nodes retest, then slurm-health nodes release"
            )
            return []
        checks.append(planned)
    results = hook.retest(checks, kept)
    hook.log.results(results)
    return results


# --- this node's health, for launchers -----------------------------------------------------------


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `health.json` says; after `valid_until`, seconds since the epoch, nothing is known."""

    node: str
    status: Literal["healthy", "faulty", "unknown"]
    faults: list[str]
    checked_at: int
    valid_until: int


def publish_health(site: Site, results: Sequence[CheckResult], *, node: str, now_s: float) -> None:
    """Replace `health.json`, which any user of this node can read; a failure changes nothing.

    `unknown` is a node without a proven fault on which a check could not measure.
    """
    if os.geteuid() != 0:
        return
    from slurm_health.system.private_files import publish

    faults = [f"{result.name}: {result.finding.text}" for result in node_faults(results)]
    unmeasured = any(result.status is Status.INCONCLUSIVE for result in results)
    health = NodeHealth(
        node=node,
        status="faulty" if faults else "unknown" if unmeasured else "healthy",
        faults=[cut(fault, _TEXT_LENGTH) for fault in faults],
        checked_at=int(now_s),
        valid_until=int(now_s + HEALTH_VALID_S),
    )

    def work() -> bytes:
        # Others may enter the directory; whatever else root keeps there is closed to them.
        site.state.chmod(stat.S_IMODE(site.state.stat().st_mode) | 0o011)
        publish(site.state / HEALTH_FILE, msgspec.json.encode(health), mode=0o644)
        return b""

    run_guarded(site.state, HEALTH_FILE, work, _KEEP_LIMIT_S)


# --- the last one of each node ------------------------------------------------------------------


class LastCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One health check, and how far a drained node is on its way back.

    Args:
        node: the node.
        time_s: when.
        faulty: whether it measured a fault of the node.
        text: how it ended.
        faults: the faults.
        passes: of the checks that the node was drained for, so far.
        needs: what it waits for, if its passes are not enough.
        recorded: whether the node knows what it was drained for.
        trouble: what is wrong with its config file, if it uses the last good settings.
    """

    node: str
    time_s: float
    faulty: bool
    text: str
    faults: str = ""
    passes: int = 0
    needs: str = ""
    recorded: bool = False
    trouble: str = ""


def last_check_of(results: Sequence[CheckResult], *, node: str, now_s: float) -> LastCheck:
    """Return how a health check ended."""
    faults = node_faults(results)
    others = [each for each in results if each.status not in WELL and each not in faults]
    bad = [*faults, *others]  # or what is cut off may be the fault
    told = "; ".join(f"{each.name} {each.status.value}: {each.finding.text}" for each in bad)
    return LastCheck(
        node=node,
        time_s=now_s,
        faulty=bool(faults),
        text=cut(told, _TEXT_LENGTH) or f"{counted(len(results), 'check')} passed",
        faults=cut("; ".join(f"{each.name}: {each.finding.text}" for each in faults), _TEXT_LENGTH),
    )


def keep_last_check(site: Site, found: LastCheck) -> None:
    """Leave it in the shared directory, in a child; what cannot be kept is lost."""
    if not site.breaker.directory:
        return
    from slurm_health.node import shared
    from slurm_health.system.private_files import publish

    def work() -> bytes:
        directory = shared.directory(site.breaker) / _LAST_CHECKS
        directory.mkdir(mode=0o755, exist_ok=True)
        publish(directory / f"{found.node}.json", msgspec.json.encode(found))
        return b""

    run_guarded(site.state, shared.STUCK, work, _KEEP_LIMIT_S)


def read_last_checks(site: Site) -> dict[str, LastCheck]:
    """Return the last health check of every node that has left one."""
    found = {}
    for path in (Path(site.breaker.directory or "/nowhere") / _LAST_CHECKS).glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found[path.stem] = from_json(path.read_bytes(), LastCheck)
    return found


def forget_last_checks(site: Site, nodes: Collection[str]) -> None:
    """Remove those of nodes that Slurm has no more, where whoever asks may."""
    if site.breaker.directory:
        with contextlib.suppress(OSError):
            for path in (Path(site.breaker.directory) / _LAST_CHECKS).glob("*.json"):
                if path.stem not in nodes:
                    path.unlink()
