# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and bring back what we drained.

On a node that is well, and that we did not drain, Slurm is asked nothing. On one that we did drain,
it is asked whether the drain is still ours.
"""

from __future__ import annotations

from slurm_health.node.checks.check import Planned
from slurm_health.node.draining import own_drain
from slurm_health.node.hooks import last_check
from slurm_health.node.hooks.hook import Hook
from slurm_health.node.rules.finding import Status, node_faults
from slurm_health.node.rules.recovery import DrainRecord, after_test, is_due

# Of the 36 s in which a health check asks Slurm (`hooks.__main__`): a node is returned within them.
LONGEST_REPEAT_S = 30.0


def run(hook: Hook) -> bool:
    """Run the health check; return whether the node has a proven fault."""
    hook.was_returned()
    results = hook.check()
    faults = node_faults(results)
    kept = own_drain.recall(hook.site.state, hook.node)
    if kept is not None:
        _recover(hook, kept, no_fault=not faults)
        if faults and hook.held_by:
            hook.log.info(f"already out of the pool: {hook.held_by}")
    elif faults:
        hook.drain(hook.cause(faults))
    last_check.keep(
        hook.site, last_check.of_results(results, node=hook.node, now_s=hook.context.now_s)
    )
    if hook.site.metrics.directory:
        from slurm_health.node.hooks import metrics  # which few sites have

        drained = own_drain.recall(hook.site.state, hook.node) is not None
        now_s, node = hook.context.now_s, hook.node
        metrics.keep(hook.site, results, node=node, now_s=now_s, drained=drained)
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
            hook.log.warning(
                f"drained for {name}, which is no longer configured: a person has to release it"
            )
            return False
        if planned.time_limit_s > LONGEST_REPEAT_S:
            hook.log.info(
                f"drained for {name}, which may take {planned.time_limit_s:g} s, longer than a"
                " health check: slurm-health nodes retest, then slurm-health nodes release"
            )
            return False
        checks.append(planned)
    results = hook.retest(checks, kept)
    hook.log.results(results)
    return bool(results) and all(each.status is Status.PASS for each in results)
