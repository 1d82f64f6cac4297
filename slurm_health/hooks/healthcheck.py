# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and bring back what we drained.

On a node that is well, and that we did not drain, Slurm is asked nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.checks.check import CheckContext, Planned
from slurm_health.core.node.finding import CheckResult, Status, node_faults
from slurm_health.hooks.log import Log
from slurm_health.hooks.run_checks import choose, node_name, run_checks, running
from slurm_health.site_settings import Site

if TYPE_CHECKING:
    from slurm_health.core.node.recovery import DrainRecord


def run(site: Site, environ: Mapping[str, str], place: CheckContext) -> bool:
    """Run the health check; return whether the node has a proven fault."""
    from slurm_health.draining import own_drain

    node = node_name(environ)
    log = Log("healthcheck", node)
    chosen = choose(site.checks, context="healthcheck", node=node, partition=None)
    results = run_checks(running(chosen), place)
    log.results(results)
    faults = node_faults(results)
    kept = own_drain.load(site.state)
    if kept is not None:
        _recover(site, environ, place, log, not faults)
    if faults and (kept is None or _was_given_back(site, environ, kept, place.now_s)):
        _drain(site, environ, place, log, faults)
    return bool(faults)


def _was_given_back(
    site: Site, environ: Mapping[str, str], kept: DrainRecord, now_s: float
) -> bool:
    """Tell whether a node we drained is in the pool again, asking Slurm now and then only."""
    from slurm_health.core.node.recovery import is_doubtful
    from slurm_health.draining import own_drain
    from slurm_health.errors import SlurmError
    from slurm_health.slurm.client import Client

    if not is_doubtful(kept, now_s):
        return False
    try:
        now = Client.for_hook(environ, limit_s=site.hooks.slurm_limit_s).node(kept.node)
    except SlurmError:
        return False
    if now.out_of_pool:
        own_drain.keep(site.state, msgspec.structs.replace(kept, passes=0, asked_s=now_s))
        return False
    own_drain.drop(site.state)
    return True


def _drain(
    site: Site,
    environ: Mapping[str, str],
    place: CheckContext,
    log: Log,
    faults: Sequence[CheckResult],
) -> None:
    from slurm_health.draining.drain import cause_of, drain_this_node
    from slurm_health.slurm.client import Client

    outcome = drain_this_node(
        site,
        node_name(environ),
        cause_of(faults, environ, "healthcheck"),
        controller=Client.for_hook(environ, limit_s=site.hooks.slurm_limit_s),
        now_s=place.now_s,
    )
    log.error(f"{outcome.came.value}: {outcome.text}")


def _recover(
    site: Site, environ: Mapping[str, str], place: CheckContext, log: Log, well: bool
) -> None:
    """Test anew what this node was drained for; after enough passes, give it back."""
    from slurm_health.core.node.recovery import after_test, is_due
    from slurm_health.draining import own_drain

    kept = own_drain.load(site.state)
    assert kept is not None
    passes = well and retest(site, kept.retest, place, log)
    after = after_test(kept, all_passed=passes, now_s=place.now_s, settings=site.recovery)
    if after != kept:
        own_drain.keep(site.state, after)
    if after.passes > kept.passes:
        log.info(f"pass {after.passes} of {site.recovery.passes} of {', '.join(kept.retest)}")
    if is_due(after, site.recovery):
        from slurm_health.draining.own_drain import release_own
        from slurm_health.slurm.client import Client

        controller = Client.for_hook(environ, limit_s=site.hooks.slurm_limit_s)
        log.info(release_own(site, after, controller))


def retest(site: Site, names: Sequence[str], place: CheckContext, log: Log) -> bool:
    """Run the checks of these names and tell whether every one passes.

    One that the configuration no longer has cannot pass: then a person decides.
    """
    checks: list[Planned] = []
    for name in names:
        planned = site.named(name)
        if planned is None:
            log.warning(f"drained for {name}, which is not configured any more")
            return False
        checks.append(planned)
    results = run_checks(checks, msgspec.structs.replace(place, context="retest"))
    return bool(results) and all(each.status is Status.PASS for each in results)
