# SPDX-License-Identifier: Apache-2.0
"""HealthCheckProgram: check the node every few minutes, and bring back what we drained.

On a node that is well, and that we did not drain, Slurm is asked nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.checks.check import Planned
from slurm_health.core.node.finding import Status
from slurm_health.core.node.recovery import DrainRecord, after_test, is_doubtful, is_due
from slurm_health.draining import own_drain
from slurm_health.errors import SlurmError
from slurm_health.hooks.hook import Hook


def run(hook: Hook) -> bool:
    """Run the health check; return whether the node has a proven fault."""
    faults = hook.faults()
    kept = own_drain.recall(hook.site.state)
    if kept is not None:
        _recover(hook, kept, no_fault=not faults)
    if faults and (kept is None or _was_given_back(hook, kept)):
        hook.drain(hook.cause(faults))
    return bool(faults)


def _recover(hook: Hook, kept: DrainRecord, *, no_fault: bool) -> None:
    """Test again what this node was drained for; after enough passes, give it back."""
    settings, state = hook.site.recovery, hook.site.state
    passes = no_fault and _all_pass(hook, kept.retest)
    after = after_test(kept, all_passed=passes, now_s=hook.context.now_s, settings=settings)
    if after != kept:
        own_drain.amend(state, kept, after)
    if after.passes > kept.passes:
        hook.log.info(f"pass {after.passes} of {settings.passes} of {', '.join(kept.retest)}")
    if is_due(after, settings):
        hook.log.info(own_drain.release_own(hook.site, after, hook.controller()))


def _all_pass(hook: Hook, names: Sequence[str]) -> bool:
    """Run the checks of these names and tell whether every one passes.

    One that the configuration no longer has cannot pass: then a person decides.
    """
    checks: list[Planned] = []
    for name in names:
        planned = hook.site.named(name)
        if planned is None:
            hook.log.warning(f"drained for {name}, which is no longer configured")
            return False
        checks.append(planned)
    results = hook.retest(checks)
    return bool(results) and all(each.status is Status.PASS for each in results)


def _was_given_back(hook: Hook, kept: DrainRecord) -> bool:
    """Tell whether a node we drained is in the pool again, asking Slurm now and then only."""
    now_s, state = hook.context.now_s, hook.site.state
    if not is_doubtful(kept, now_s):
        return False
    try:
        now = hook.controller().node(kept.node)
    except SlurmError:
        return False
    if now.out_of_pool:
        own_drain.amend(state, kept, msgspec.structs.replace(kept, passes=0, asked_s=now_s))
        return False
    own_drain.forget(state)
    return True
