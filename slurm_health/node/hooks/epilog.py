# SPDX-License-Identifier: Apache-2.0
"""After a job: check the node, and follow up what the job's own check says against it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.hook import Hook, number
from slurm_health.node.hooks.user_journal import (
    JobEnded,
    Unreadable,
    accusations,
    append_held,
    job_of,
)
from slurm_health.node.rules.finding import Status, is_worse, node_faults
from slurm_health.node.rules.settings import AccusationPolicy
from slurm_health.node.run import confirming
from slurm_health.node.state import load_slurm
from slurm_health.records.errors import SlurmError

if TYPE_CHECKING:  # most jobs accuse no node, and their epilogs load none of it
    from slurm_health.node.drain import Cause
    from slurm_health.node.rules.accusations import Accusation


# Tests of this node for users' jobs are so far apart.
_APART_S = 600.0


def run(hook: Hook) -> bool:
    """Run the epilog; return whether it drained this node, so that the epilog is to fail.

    A failed epilog is what makes Slurm start an expedited job again at once, elsewhere.
    """
    faults = node_faults(hook.check())
    _record_left(hook)
    cause = hook.cause(faults) if faults else _accused(hook)
    return cause is not None and hook.drain(cause)


def _record_left(hook: Hook) -> None:
    """Record processes of the job that cannot be ended, on the node and in the job's journal.

    If no check reports more than a warning, and no hook has seen any, nothing is read.
    """
    site, job = hook.site, number(hook.environ, "SLURM_JOB_ID", 0)
    before = load_slurm(site.state, hook.node)
    suspicious = any(is_worse(result.status, Status.WARN) for result in hook.results)
    if site.recovery.slurm_drains == "off" or not job:
        return
    if not suspicious and (before is None or before.job != job):
        return
    from slurm_health.node import slurm_drains

    record = slurm_drains.record_left(
        site,
        hook.node,
        job,
        uid=number(hook.environ, "SLURM_JOB_UID", -1),
        array=number(hook.environ, "SLURM_ARRAY_JOB_ID", 0),
        now_s=hook.context.now_s,
    )
    if record is None:
        return
    text = slurm_drains.sentence(site, record, hook.context.now_s)
    hook.log.warning(text)
    ended = job_of(hook.environ)
    if ended is not None:
        append_held(site, ended, hook.node, text)


def _accused(hook: Hook) -> Cause | None:
    """Return why the verdict of the ended job's own check drains this node; None if it does not.

    A verdict of the sweep's user counts as root's own. Another user's counts if a check of this
    node confirms it, or together with other users' marks.
    """
    ended = job_of(hook.environ)
    if ended is None:
        return None
    try:
        accused = accusations(hook.site, ended, hook.node)
        if accused and not ended.start_s:  # this Slurm sets no start: the id may be an old job's
            ended = _with_start(hook, ended)
            accused = accusations(hook.site, ended, hook.node)
    except Unreadable as err:
        hook.log.warning(f"could not read the job's journal: {err}")
        return None
    if not accused:
        return None
    from slurm_health.node.hooks import partners
    from slurm_health.node.rules.accusations import effective

    accusation, is_sweep = effective(accused), partners.is_of_sweep(hook.site, ended.uid)
    if accusation is None:
        if is_sweep:
            _delete_marks(hook)
        return None
    if not is_sweep:
        what = "calls this node slow" if accusation.slow else "accuses this node"
        hook.log.warning(f"user {ended.uid} {what}: {accusation.text}")
        if hook.site.accusations.policy is AccusationPolicy.NEVER:
            return None
    confirmed = _confirmed(hook, accusation, apart_s=0.0 if is_sweep else _APART_S)
    if confirmed is not None or accusation.slow:
        return confirmed
    if is_sweep:
        return _unconfirmed(ended, "sweep", accusation.text)
    cause = _marked(hook, ended, accusation)
    if hook.site.sweep.user:
        request = partners.Request(
            node=hook.node,
            partition=hook.environ.get("SLURM_JOB_PARTITION", ""),
            job=ended.job,
            time_s=hook.context.now_s,
        )
        try:
            partners.start(hook.site, request, hook.environ)
            hook.log.info(f"the sweep of {hook.site.sweep.user} checks it with partners")
        except OSError as err:
            hook.log.warning(f"not checked with partners: {err}")
    return cause


def _with_start(hook: Hook, ended: JobEnded) -> JobEnded:
    """Return the job with its start as Slurm knows it, unchanged if it does not."""
    try:
        start_s = hook.controller().start_s(ended.job)
    except SlurmError as err:
        hook.log.warning(f"could not ask when the job started: {err}")
        return ended
    known = start_s <= hook.context.now_s
    return msgspec.structs.replace(ended, start_s=start_s) if known else ended


def _confirmed(hook: Hook, accusation: Accusation, *, apart_s: float) -> Cause | None:
    """Test this node here and now, as root; return the faults as a cause, None for no fault."""
    # The job's check does not know why a node is slow: a starved processor slows its network down.
    component = "node" if accusation.slow else accusation.component
    partition = hook.environ.get("SLURM_JOB_PARTITION")
    checks = confirming(hook.site.planned, component, hook.node, partition)
    if not checks:
        hook.log.info(f"not confirmed: no check tests {component}")
        return None
    with reserve_test(hook.site.state, hook.context.now_s, apart_s=apart_s) as why_not:
        if why_not:
            hook.log.warning(f"not tested: {why_not}")
            return None
        results = hook.retest(checks)
    hook.log.results(results)
    faults = node_faults(results)
    if faults:
        return msgspec.structs.replace(hook.cause(faults), confirms=accusation.component)
    hook.log.info(f"not confirmed by {', '.join(check.name for check in checks)}")
    return None


@contextlib.contextmanager
def reserve_test(state: Path, now_s: float, *, apart_s: float = _APART_S) -> Iterator[str]:
    """Hold the right to test this node; yield why there is none, empty if there is.

    One test at a time, and one in `apart_s`: a test takes processors or GPUs, and a job of one
    second with a forged journal would be enough to start one beside the jobs of others.
    """
    from slurm_health.node.store import held

    path = state / "tested.lock"
    with contextlib.ExitStack() as stack:
        why_not = ""
        try:
            before_s = path.stat().st_mtime if path.exists() else -math.inf
            if not stack.enter_context(held(path)):
                why_not = "another test of this node is running"
            elif abs(now_s - before_s) < apart_s:
                why_not = f"it was tested within {apart_s / 60:g} min"
            else:
                os.utime(path, (now_s, now_s))
        except OSError as err:
            why_not = f"tests cannot be counted in {state}: {err}"
        yield why_not


def _delete_marks(hook: Hook) -> None:
    """Delete this node's marks: a check of the sweep measured it and it is healthy."""
    from slurm_health.node.marks import MARKS
    from slurm_health.node.shared import StoreUnusable, in_child

    hook.log.info("the sweep has measured no fault: its marks are removed")
    try:
        in_child(hook.site, lambda: MARKS.delete(hook.site.breaker, hook.node), type(None))
    except StoreUnusable as err:
        hook.log.warning(f"its marks could not be removed: {err}")


def _marked(hook: Hook, ended: JobEnded, accusation: Accusation) -> Cause | None:
    """Mark this node; return its marks as a cause once enough users accuse it."""
    from slurm_health.node import marks
    from slurm_health.node.rules.accusations import NodeMark, quorum_reached, summary
    from slurm_health.node.shared import StoreUnusable

    mark = NodeMark(
        job=ended.job,
        uid=ended.uid,
        component=accusation.component,
        text=accusation.text,
        time_s=hook.context.now_s,
    )
    try:
        known = marks.add(hook.site, hook.node, mark)
    except StoreUnusable as err:
        hook.log.warning(f"could not record the accusation: {err}")
        return None
    if not quorum_reached(known, hook.site.accusations):
        hook.log.info(f"marked: {summary(known)}")
        return None
    return _unconfirmed(ended, "marks", summary(known))


def _unconfirmed(ended: JobEnded, check: str, text: str) -> Cause:
    """Return a cause that no check of this node can clear."""
    from slurm_health.node.drain import Cause

    return Cause(checks=(check,), text=text, retest=(), job=ended.job, uid=ended.uid, hook="epilog")
