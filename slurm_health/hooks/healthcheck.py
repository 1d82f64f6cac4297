# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and bring back what we drained.

On a node that is well, and that we did not drain, Slurm is asked nothing.
"""

from __future__ import annotations

from slurm_health.checks.check import Planned
from slurm_health.core.node.finding import Status, node_faults
from slurm_health.core.node.recovery import DrainRecord, after_test, is_due
from slurm_health.draining import own_drain
from slurm_health.errors import SlurmError
from slurm_health.hooks import last_check
from slurm_health.hooks.hook import Hook


def run(hook: Hook) -> bool:
    """Run the health check; return whether the node has a proven fault."""
    results = hook.check()
    faults = node_faults(results)
    kept = own_drain.recall(hook.site.state)
    if kept is not None:
        _recover(hook, kept, no_fault=not faults)
    if faults and not (kept is not None and _still_out(hook, kept)):
        hook.drain(hook.cause(faults))
    last_check.keep(
        hook.site, last_check.of_results(results, node=hook.node, now_s=hook.context.now_s)
    )
    if hook.site.metrics.directory:
        from slurm_health.hooks import metrics  # which few sites have

        drained = own_drain.recall(hook.site.state) is not None
        metrics.keep(hook.site, results, now_s=hook.context.now_s, drained=drained)
    return bool(faults)


def _recover(hook: Hook, kept: DrainRecord, *, no_fault: bool) -> None:
    """Test again what this node was drained for; after enough passes, give it back."""
    settings, state = hook.site.recovery, hook.site.state
    passes = no_fault and _all_pass(hook, kept)
    after = after_test(kept, all_passed=passes, now_s=hook.context.now_s, settings=settings)
    if after != kept:
        own_drain.amend(state, kept, after)
    if after.passes > kept.passes:
        hook.log.info(f"pass {after.passes} of {settings.passes} of {', '.join(kept.retest)}")
    if is_due(after, settings):
        hook.log.info(own_drain.release_own(hook.site, after, hook.controller()))


def _all_pass(hook: Hook, kept: DrainRecord) -> bool:
    """Run the checks that the node was drained for and tell whether every one passes.

    One that the configuration no longer has cannot pass: then a person decides.
    """
    checks: list[Planned] = []
    for name in kept.retest:
        planned = hook.site.named(name)
        if planned is None:
            hook.log.warning(f"drained for {name}, which is no longer configured")
            return False
        checks.append(planned)
    results = hook.retest(checks, kept.expected)
    hook.log.results(results)
    return bool(results) and all(each.status is Status.PASS for each in results)


def _still_out(hook: Hook, kept: DrainRecord) -> bool:
    """Tell whether a node that we drained, and that is bad, is out of the pool; say so."""
    try:
        now = hook.controller().node(kept.node)
    except SlurmError as err:
        hook.log.warning(f"could not query Slurm: {err}")
        return True
    if now.out_of_pool:
        hook.log.info(f"already out of the pool: {now.state}: {now.reason or '(no reason)'}")
    else:
        hook.log.info("somebody has returned it to the pool")
        own_drain.forget(hook.site.state)
    return now.out_of_pool
