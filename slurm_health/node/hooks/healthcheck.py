# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and resume it after a drain of ours.

Slurm is asked only on a node that is faulty or that we drained: whether the drain is still ours.

The time and the result of every node's last health check are in the shared directory, one file per
node, so that no lock is needed. A healthy node leaves nothing else behind.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from slurm_health.node import shared, state
from slurm_health.node.hook import Hook
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.finding import UNWATCHED, WELL, CheckResult, Status, node_faults
from slurm_health.node.rules.recovery import DrainRecord, after_test, is_due
from slurm_health.node.site import Site, keep_last_good
from slurm_health.node.store import held
from slurm_health.records.text import counted, cut
from slurm_health.system.killable import run_guarded

# Of the 36 s in which a health check asks Slurm (`hooks.__main__`): a node is returned within them.
LONGEST_REPEAT_S = 30.0
# In this node's own directory, and held while a health check is at work there.
LOCK = "healthcheck.lock"
HEALTH_FILE = "health.json"  # beside it
# Three times the interval of health checks that docs/admin/install.md sets.
HEALTH_VALID_S = 900
_KEEP_LIMIT_S = 2.0
_TEXT_LENGTH = 500
_DAY_S = 86_400.0


def run(hook: Hook) -> bool:
    """Run the health check; return whether the node has a proven fault.

    slurmd starts one at its interval, whether or not the last one has ended. On a slow node they
    would slow one another down, so all but the first end at once.
    """
    with contextlib.ExitStack() as stack:
        try:
            free = stack.enter_context(held(hook.site.state / LOCK))
        except OSError:  # a full or broken disk hides no fault
            free = True
        if free:
            return _run(hook)
    hook.log.info("nothing is checked: an earlier health check is still running")
    return False


def _run(hook: Hook) -> bool:
    site, now_s = hook.site, hook.context.now_s
    if site.repair.steps or site.repair.test:
        from slurm_health.node.repair import is_at_work

        if is_at_work(site.state):
            hook.log.info("a step to repair it is under way: nothing is checked")
            return False
    keep_last_good(site)
    if site.trouble:
        _report_trouble(hook)
    hook.sync_drain()
    results = hook.check()
    faults = node_faults(results)
    publish_health(site, results, node=hook.node, now_s=now_s)
    kept = state.load_record(site.state, hook.node)
    if kept is not None:
        _recover(hook, kept, no_fault=not faults)
        if faults and hook.held_by:
            hook.log.info(f"already out of the pool: {hook.held_by}")
    elif faults:
        hook.drain(hook.cause(faults))
    record = state.load_record(site.state, hook.node)
    last = last_check_of(results, node=hook.node, now_s=now_s)
    last = msgspec.structs.replace(last, trouble=site.trouble)
    if record is not None:
        needs = _needs_administrator(site, record)
        last = msgspec.structs.replace(last, passes=record.passes, recorded=True, needs=needs)
    look, listed = save_last_check(site, last)
    if site.recovery.slurm_drains != "off":
        if look:
            from slurm_health.system import processes

            argv = processes.own_module("slurm_health.node.slurm_drains", site.path)
            with contextlib.suppress(OSError):
                processes.start_detached(argv, hook.environ)
        if listed or state.load_slurm(site.state, hook.node) is not None:
            from slurm_health.node.slurm_drains import watch  # few nodes need it

            watch(hook, results, listed)
    if site.metrics.directory:
        from slurm_health.node.hooks import metrics  # few sites have them

        metrics.write(site, results, node=hook.node, now_s=now_s, drained=record is not None)
    return bool(faults)


def _report_trouble(hook: Hook) -> None:
    """Notify of a config file that cannot be used: once a day for all nodes."""
    from slurm_health.node import notify
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
        event = notify.NodeEvent(notify.EventKind.UNCHECKED, hook.node, now_s, trouble)
        notify.send(hook.site, event)


def _needs_administrator(site: Site, record: DrainRecord) -> str:
    """Return why passes cannot return a node, and what to do; empty if they can."""
    needs = "an administrator has to release it"
    for name in record.retest:
        check = site.named(name)
        if check is None:
            return f"{needs} once it is well: the config file lacks {name}"
        if check.time_limit_s > LONGEST_REPEAT_S:
            return (
                f"{needs}: {name} may take {check.time_limit_s:g} s, longer than a health check"
                " (slurm-health healthcheck --context retest on the node, then nodes release)"
            )
    return "" if record.retest else needs


def _recover(hook: Hook, kept: DrainRecord, *, no_fault: bool) -> None:
    """Repeat the checks that this node was drained for; after enough passes, resume it."""
    settings, directory = hook.site.recovery, hook.site.state
    needs = _needs_administrator(hook.site, kept)
    if needs and no_fault and kept.retest:
        hook.log.warning(needs)
    planned = [hook.site.named(name) for name in kept.retest] if no_fault and not needs else []
    checks = [check for check in planned if check is not None]
    results = hook.retest(checks, kept) if checks else []
    hook.log.results(results)
    passed = bool(results) and all(result.status is Status.PASS for result in results)
    after = after_test(kept, all_passed=passed, now_s=hook.context.now_s, settings=settings)
    if after != kept:
        state.replace_record(directory, kept, after)
    if after.passes > kept.passes:
        hook.log.info(f"pass {after.passes} of {settings.passes} of {', '.join(kept.retest)}")
    now, steps, test = hook.slurm_node, hook.site.repair.steps, hook.site.repair.test
    is_ours = now is not None and state.load_record(directory) is not None
    # The site's own test may clear what no check of this node can.
    only_test = no_fault and not kept.retest and bool(test) and bool(settings.passes)
    due = is_due(after, settings) or (only_test and is_ours)
    if now is not None and (steps or test) and (due or is_ours):
        from slurm_health.node.repair import advance  # few sites repair, and few nodes need it

        faults = [*node_faults(hook.results), *node_faults(results)]
        if due:
            due = advance(hook, after, now, passes=True)
        elif steps and (faults or not kept.retest) and not passed:
            advance(hook, kept, now, faults, passes=False)
    if due and now is not None and drain_note.unsigned(now.reason) != kept.reason:
        hook.log.info(f"its checks pass, but Slurm drained it since: {now.reason}")
    elif due:
        from slurm_health.node import drain, slurm_drains

        if left := slurm_drains.leftovers(hook.site, hook.node):
            hook.log.info(f"not released: {left}")
            return
        hook.log.info(drain.release_own(hook.site, after, hook.controller()))


# --- this node's health, for launchers -----------------------------------------------------------


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `health.json`, which expires at `valid_until`, seconds since the epoch."""

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
        # Others may enter the directory; root's other files there are closed to them.
        site.state.chmod(stat.S_IMODE(site.state.stat().st_mode) | 0o011)
        publish(site.state / HEALTH_FILE, msgspec.json.encode(health), mode=0o644)
        return b""

    run_guarded(site.state, HEALTH_FILE, work, _KEEP_LIMIT_S)


# --- the last health check of every node ---------------------------------------------------------


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
        unwatched: the jobs that run on though their watch has ended, in words.
        progress: that of the jobs whose first node it is, as far as their watches show it.
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
    unwatched: str = ""
    progress: dict[str, str] = {}


LAST_CHECKS = shared.NodeFiles("checked", LastCheck)


def last_check_of(results: Sequence[CheckResult], *, node: str, now_s: float) -> LastCheck:
    """Return a health check with these results, the faults first."""
    faults = node_faults(results)
    others = [result for result in results if result.status not in WELL and result not in faults]
    text = "; ".join(
        f"{result.name} {result.status.value}: {result.finding.text}"
        for result in (*faults, *others)
    )
    watches = [r.finding for r in results if UNWATCHED in r.finding.figures]
    blind = [finding.text for finding in watches if finding.figures[UNWATCHED]]
    return LastCheck(
        node=node,
        time_s=now_s,
        unwatched=cut("; ".join(blind), _TEXT_LENGTH),
        progress={n: v for f in watches for n, v in f.figures.items() if isinstance(v, str)},
        faulty=bool(faults),
        text=cut(text, _TEXT_LENGTH) or f"{counted(len(results), 'check')} passed",
        faults=cut("; ".join(f"{r.name}: {r.finding.text}" for r in faults), _TEXT_LENGTH),
    )


def save_last_check(site: Site, check: LastCheck) -> tuple[bool, bytes]:
    """Save a health check in the shared directory, in a child; a failure loses it.

    Return what the child has read there: whether this node is to look at all nodes now, and the
    list of Slurm's own drains if it names this node.
    """
    if not site.breaker.directory:
        return False, b""

    def work() -> tuple[bool, bytes]:
        LAST_CHECKS.save(site.breaker, check.node, check)
        return shared.claim_look(shared.directory(site.breaker), check.node, time.time())

    try:
        return shared.in_child(site, work, tuple[bool, bytes], limit_s=_KEEP_LIMIT_S)
    except shared.StoreUnusable:
        return False, b""
