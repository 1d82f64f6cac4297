# SPDX-License-Identifier: Apache-2.0
"""After a job: check, and look into what the job's own check says about this node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.hooks.hook import Hook
from slurm_health.node.hooks.user_journal import JobEnded, Unreadable, accusations, job_of
from slurm_health.node.rules.finding import node_faults
from slurm_health.node.rules.settings import AccusationPolicy
from slurm_health.node.run import confirming
from slurm_health.records.errors import SlurmError

if TYPE_CHECKING:  # most jobs accuse nobody, and then nobody needs to know what that looks like
    from slurm_health.node.drain import Cause
    from slurm_health.node.rules.accusations import Accusation


def run(hook: Hook) -> bool:
    """Run the epilog; return whether it drained this node, so that the epilog is to fail.

    A failed epilog is what makes Slurm start an expedited job again at once, elsewhere.
    """
    faults = node_faults(hook.check())
    cause = hook.cause(faults) if faults else _accused(hook)
    return cause is not None and hook.drain(cause)


def _accused(hook: Hook) -> Cause | None:
    """Return the cause that the ended job's own check gives to drain this node, None for none."""
    ended = job_of(hook.environ)
    if ended is None:
        return None
    try:
        found = accusations(hook.site, ended, hook.node)
        if found and not ended.start_s:
            found = accusations(hook.site, _with_start(hook, ended), hook.node)
    except Unreadable as err:
        hook.log.warning(f"could not read the job's journal: {err}")
        return None
    if not found:
        return None
    hook.forget_passes()  # the word of a user is enough to have a node checked
    if hook.site.sweep.user:
        from slurm_health.node.hooks import partners  # most sites have no such user

        if partners.is_of_sweep(hook.site, ended.uid):
            return _of_sweep(hook, ended, found)
    return _judged(hook, ended, found)


def _of_sweep(hook: Hook, ended: JobEnded, found: Sequence[Accusation]) -> Cause | None:
    """Return the cause that a check of the site's own gives; a healthy verdict clears the marks.

    A check without a verdict, as one that gave way or could not measure, says nothing.
    """
    from slurm_health.node import marks
    from slurm_health.node.rules.accusations import standing
    from slurm_health.node.shared import StoreUnusable, in_child

    accusation = standing(found)
    if accusation is None:
        hook.log.info("the sweep has measured no fault: its marks are removed")
        try:
            in_child(hook.site, lambda: marks.delete(hook.site.breaker, hook.node), type(None))
        except StoreUnusable as err:
            hook.log.warning(f"its marks could not be removed: {err}")
        return None
    confirmed = _confirmed(hook, ended, accusation)
    if confirmed is not None or accusation.slow:
        return confirmed
    return _unconfirmed(ended, "sweep", f"{accusation.component}: {accusation.reason}")


def _judged(hook: Hook, ended: JobEnded, found: Sequence[Accusation]) -> Cause | None:
    """Return the cause that a user's word about this node gives to drain it, None for none."""
    from slurm_health.node.rules.accusations import standing

    accusation = standing(found)
    if accusation is None:
        return None
    what = "calls this node slow" if accusation.slow else "accuses this node"
    hook.log.warning(f"user {ended.uid} {what}: {accusation.component}: {accusation.reason}")
    policy = hook.site.accusations.policy
    if policy is AccusationPolicy.NEVER:
        return None
    confirmed = _confirmed(hook, ended, accusation)
    if confirmed is not None or accusation.slow:
        return confirmed
    return _not_confirmed(hook, ended, accusation)


def _not_confirmed(hook: Hook, ended: JobEnded, accusation: Accusation) -> Cause | None:
    """Return the cause that an accusation is which no test of this node alone confirms."""
    policy = hook.site.accusations.policy
    if policy is AccusationPolicy.EVIDENCE and accusation.strong:
        text = f"{accusation.component}: {accusation.reason}"
        return _unconfirmed(ended, "accused", text)
    marked = _marked(hook, ended, accusation)
    if not hook.site.sweep.user:
        return marked
    from slurm_health.node.hooks import partners  # as above

    request = partners.Request(
        node=hook.node,
        partition=hook.environ.get("SLURM_JOB_PARTITION", ""),
        job=ended.job,
        time_s=hook.context.now_s,
    )
    try:
        partners.ask(hook.site, request, hook.environ)
    except OSError as err:
        hook.log.warning(f"not checked with partners: {err}")
    else:
        hook.log.info(f"the sweep of {hook.site.sweep.user} checks it with partners")
    return marked


def _with_start(hook: Hook, ended: JobEnded) -> JobEnded:
    """Ask when the job started, where this Slurm does not tell hooks: its id may be an old one."""
    try:
        start_s = hook.controller().start_s(ended.job)
    except SlurmError as err:
        hook.log.warning(f"could not ask when the job started: {err}")
        return ended
    known = start_s <= hook.context.now_s
    return msgspec.structs.replace(ended, start_s=start_s) if known else ended


def _confirmed(hook: Hook, ended: JobEnded, accusation: Accusation) -> Cause | None:
    """Test this node here and now, as root, and return the cause that a failure is."""
    # Why a node is slow the job's check cannot tell: a starved processor slows its network down.
    component = "node" if accusation.slow else accusation.component
    partition = hook.environ.get("SLURM_JOB_PARTITION")
    checks = confirming(hook.site.planned, component, hook.node, partition)
    if not checks:
        hook.log.info(f"not confirmed: no check tests {component}")
        return None
    with turn_to_test(hook.site.state, ended.uid, hook.context.now_s) as why_not:
        if why_not:
            hook.log.warning(f"not tested: {why_not}")
            return None
        results = hook.retest(checks)
    hook.log.results(results)
    faults = node_faults(results)
    if faults:
        return msgspec.structs.replace(hook.cause(faults), confirms=accusation.component)
    hook.log.info(f"not confirmed by {', '.join(each.name for each in checks)}")
    return None


@contextlib.contextmanager
def turn_to_test(state: Path, uid: int, now_s: float) -> Iterator[str]:
    """Hold the turn for a test of this node; yield why there is none, empty if there is.

    One at a time, and each user's only so often: a test takes processors or GPUs, and a job of one
    second with a forged journal would be enough to have root start one beside the jobs of others.
    """
    from slurm_health.node.rules.accusations import TESTS_PER_USER_HOUR, Tested, with_test
    from slurm_health.node.store import Store, StoreDamaged, StoreUnusable, held
    from slurm_health.records.text import counted

    store = Store(state / "tested.json", Tested)  # for root: it says whose jobs accused this node
    with contextlib.ExitStack() as stack:
        try:
            if not stack.enter_context(held(state / "tested.lock")):
                why_not = "another test of this node is running"
            else:
                try:
                    before = store.load() or {}
                except StoreDamaged:
                    before = {}
                tested = with_test(before, uid, now_s)
                times = counted(TESTS_PER_USER_HOUR, "time")
                why_not = f"jobs of user {uid} have had it tested {times} within the hour"
                if tested is not None:
                    store.save(tested)
                    why_not = ""
        except (OSError, StoreUnusable) as err:
            why_not = f"tests cannot be counted in {state}: {err}"
        yield why_not


def _marked(hook: Hook, ended: JobEnded, accusation: Accusation) -> Cause | None:
    """Mark this node, and return the cause that its marks are by now."""
    from slurm_health.node import marks
    from slurm_health.node.rules.accusations import NodeMark, convict, summary
    from slurm_health.node.shared import StoreUnusable

    site = hook.site
    mark = NodeMark(
        job=ended.job,
        uid=ended.uid,
        component=accusation.component,
        text=f"{accusation.component}: {accusation.reason}",
        time_s=hook.context.now_s,
    )
    try:
        known = marks.add(site, hook.node, mark)
    except StoreUnusable as err:
        hook.log.warning(f"could not record the accusation: {err}")
        return None
    if not convict(known, site.accusations):
        hook.log.info(f"marked: {summary(known)}")
        return None
    return _unconfirmed(ended, "marks", summary(known))


def _unconfirmed(ended: JobEnded, check: str, text: str) -> Cause:
    """Return a cause that no check of this node can take back."""
    from slurm_health.node.drain import Cause

    return Cause(checks=(check,), text=text, retest=(), job=ended.job, uid=ended.uid, hook="epilog")
