# SPDX-License-Identifier: Apache-2.0
"""Before a job: check the node; drain it and have the job requeued only for a proven fault."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_health.checks.check import CheckContext
from slurm_health.core.node.finding import node_faults
from slurm_health.hooks.log import Log
from slurm_health.hooks.run_checks import choose, node_name, run_checks, running
from slurm_health.site_settings import Site


def run(site: Site, environ: Mapping[str, str], place: CheckContext) -> bool:
    """Run the checks of the prolog; return whether the job must not start here.

    While the node is well this asks nobody anything and loads nothing more.
    """
    node = node_name(environ)
    log = Log("prolog", node, environ.get("SLURM_JOB_ID", ""))
    if opted_out(site, environ):
        log.info(f"the job opted out of checks ({site.hooks.opt_out})")
        return False
    partition = environ.get("SLURM_JOB_PARTITION")
    chosen = choose(site.checks, context="prolog", node=node, partition=partition)
    results = run_checks(running(chosen), place)
    log.results(results)
    faults = node_faults(results)
    if not faults:
        return False
    from slurm_health.draining.drain import Came, cause_of, drain_this_node
    from slurm_health.slurm.client import Client

    outcome = drain_this_node(
        site,
        node,
        cause_of(faults, environ, "prolog"),
        controller=Client.for_hook(environ, limit_s=site.hooks.slurm_limit_s),
        now_s=place.now_s,
    )
    log.error(f"{outcome.came.value}: {outcome.text}")
    # Without a drain the job must start: a failed prolog makes Slurm drain, past the breaker.
    return outcome.came is not Came.NOT_DRAINED


def opted_out(site: Site, environ: Mapping[str, str]) -> bool:
    """Tell whether the job carries the word by which this site lets jobs opt out.

    Slurm leaves the variables out when slurmd holds no credential; then nobody opted out.
    """
    if not site.hooks.opt_out:
        return False
    words = f"{environ.get('SLURM_JOB_COMMENT', '')} {environ.get('SLURM_JOB_EXTRA', '')}".split()
    return site.hooks.opt_out in words
