# SPDX-License-Identifier: Apache-2.0
"""After a job: clean up, check, and look into what the job's own check says about this node."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping

import msgspec

from slurm_health.checks.check import CheckContext, Unmeasured
from slurm_health.checks.tasks import Process, of_job, parse_stat
from slurm_health.core.node.finding import node_faults
from slurm_health.core.node.settings import AccusationPolicy
from slurm_health.draining.drain import Came, Cause, cause_of, drain_this_node
from slurm_health.hooks.log import Log
from slurm_health.hooks.run_checks import choose, confirming, node_name, run_checks, running
from slurm_health.hooks.user_journal import JobEnded, Unreadable, accusations, job_of
from slurm_health.killable import Answered, run_one
from slurm_health.site_settings import Site
from slurm_health.slurm.client import Client


def run(site: Site, environ: Mapping[str, str], place: CheckContext) -> bool:
    """Run the epilog; return whether it drained this node, so that the epilog is to fail.

    A failed epilog is what makes Slurm start an expedited job again at once, elsewhere.
    """
    node = node_name(environ)
    log = Log("epilog", node, environ.get("SLURM_JOB_ID", ""))
    partition = environ.get("SLURM_JOB_PARTITION")
    chosen = choose(site.checks, context="epilog", node=node, partition=partition)
    results = run_checks(running(chosen), place)
    log.results(results)
    if site.hooks.end_leftovers:
        _clean(place, log)
    faults = node_faults(results)
    cause = cause_of(faults, environ, "epilog") if faults else _accused(site, environ, place, log)
    if cause is None:
        return False
    outcome = drain_this_node(
        site,
        node,
        cause,
        controller=Client.for_hook(environ, limit_s=site.hooks.slurm_limit_s),
        now_s=place.now_s,
    )
    log.error(f"{outcome.came.value}: {outcome.text}")
    return outcome.came is not Came.NOT_DRAINED


def _clean(place: CheckContext, log: Log) -> None:

    for each in end_leftovers(place):
        log.warning(f"cannot be killed, left by the job: {each.name}({each.pid})")


def _accused(site: Site, environ: Mapping[str, str], place: CheckContext, log: Log) -> Cause | None:
    ended = job_of(environ)
    if ended is None:
        return None
    node = node_name(environ)
    try:
        found = accusations(site, ended, node)
    except Unreadable as err:
        log.warning(f"the job's journal is not read: {err}")
        return None
    if not found:
        return None
    accusation = next((each for each in reversed(found) if not each.slow), found[-1])
    said = f"{accusation.component}: {accusation.reason}"
    what = "calls this node slow" if accusation.slow else "accuses this node"
    log.warning(f"user {ended.uid} {what}: {said}")
    if site.accusations.policy is AccusationPolicy.NEVER:
        return None
    confirmed = _confirmed(site, environ, place, log, accusation.component)
    if confirmed is not None or accusation.slow:
        return confirmed
    cause = Cause(
        checks=("accused",), text=said, retest=(), job=ended.job, uid=ended.uid, hook="epilog"
    )
    if site.accusations.policy is AccusationPolicy.EVIDENCE and accusation.strong:
        return cause
    return _marked(site, node, ended, cause, accusation.component, place, log)


def _confirmed(
    site: Site, environ: Mapping[str, str], place: CheckContext, log: Log, component: str
) -> Cause | None:
    """Test this node here and now, as root, and return the cause that a failure is."""
    checks = confirming(site.checks, component, node_name(environ))
    results = run_checks(checks, msgspec.structs.replace(place, context="retest"))
    log.results(results)
    faults = node_faults(results)
    if faults:
        return cause_of(faults, environ, "epilog")
    names = ", ".join(each.name for each in checks) or "no check"
    log.info(f"not confirmed: {names} for {component}")
    return None


def _marked(
    site: Site,
    node: str,
    ended: JobEnded,
    cause: Cause,
    component: str,
    place: CheckContext,
    log: Log,
) -> Cause | None:
    from slurm_health.core.node import accusations
    from slurm_health.draining import shared_state
    from slurm_health.draining.shared_state import Untrusted

    mark = accusations.Mark(
        job=ended.job, uid=ended.uid, component=component, text=cause.text, time_s=place.now_s
    )
    try:
        known = shared_state.add(site.breaker, node, mark, site.marks, owner=os.getuid())
    except Untrusted as err:
        log.warning(f"the accusation is not kept: {err}")
        return None
    if not accusations.convict(known, site.marks):
        log.info(f"marked: {accusations.summary(known)}")
        return None
    return msgspec.structs.replace(cause, checks=("marks",), text=accusations.summary(known))


_GRACE_S = 1.0
_POLL_S = 0.05
_LIMIT_S = 5.0


def end_leftovers(place: CheckContext) -> list[Process]:
    """Kill what the job left; return what is still there a second later."""
    outcome = run_one(lambda: msgspec.msgpack.encode(_end(place)), _LIMIT_S)
    if isinstance(outcome, Answered):
        return msgspec.msgpack.decode(outcome.data, type=list[Process])
    return []


def _end(place: CheckContext) -> list[Process]:
    give_up_s = time.monotonic() + _GRACE_S
    while left := of_job(place):
        for each in left:
            _kill(place, each)
        if time.monotonic() >= give_up_s:
            break
        time.sleep(_POLL_S)
    return left


def _kill(place: CheckContext, process: Process) -> None:
    """Kill this very process: its number may have passed to another meanwhile."""
    with contextlib.suppress(OSError, Unmeasured, ValueError, IndexError):
        held = os.pidfd_open(process.pid)
        try:
            now = parse_stat(place.read(f"/proc/{process.pid}/stat"))
            if now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)
