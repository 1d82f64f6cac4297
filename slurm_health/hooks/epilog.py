# SPDX-License-Identifier: Apache-2.0
"""After a job: clean up, check, and look into what the job's own check says about this node."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from slurm_health.checks.check import Place
from slurm_health.core.check_result import node_faults
from slurm_health.core.hook_settings import AccusationPolicy
from slurm_health.hooks.accused import JobEnded, Unreadable, accusations, job_of
from slurm_health.hooks.chosen import choose, confirming, node_name, running
from slurm_health.hooks.controller import Controller
from slurm_health.hooks.drain import Came, Cause, cause_of, drain_this_node
from slurm_health.hooks.log import Log
from slurm_health.hooks.runner import run_checks
from slurm_health.hooks.site_settings import Site


def run(site: Site, environ: Mapping[str, str], place: Place) -> bool:
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
        controller=Controller(environ, limit_s=site.hooks.slurm_limit_s),
        now_s=place.now_s,
    )
    log.error(f"{outcome.came.value}: {outcome.text}")
    return outcome.came is not Came.NOT_DRAINED


def _clean(place: Place, log: Log) -> None:
    from slurm_health.hooks.cleanup import end_leftovers

    for each in end_leftovers(place):
        log.warning(f"cannot be killed, left by the job: {each.name}({each.pid})")


def _accused(site: Site, environ: Mapping[str, str], place: Place, log: Log) -> Cause | None:
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
    site: Site, environ: Mapping[str, str], place: Place, log: Log, component: str
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
    place: Place,
    log: Log,
) -> Cause | None:
    from slurm_health.core import marks
    from slurm_health.hooks import marked
    from slurm_health.hooks.ledger import Untrusted

    mark = marks.Mark(
        job=ended.job, uid=ended.uid, component=component, text=cause.text, time_s=place.now_s
    )
    try:
        known = marked.add(site.breaker, node, mark, site.marks, owner=os.getuid())
    except Untrusted as err:
        log.warning(f"the accusation is not kept: {err}")
        return None
    if not marks.convict(known, site.marks):
        log.info(f"marked: {marks.summary(known)}")
        return None
    return msgspec.structs.replace(cause, checks=("marks",), text=marks.summary(known))
