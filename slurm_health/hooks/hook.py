# SPDX-License-Identifier: Apache-2.0
"""The frame that prolog, epilog and health check share: where they are, what they run and say.

On a node that is well it asks nobody anything, and loads nothing that only a drain needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.checks.check import CheckContext, Planned
from slurm_health.core.node.finding import CheckResult, node_faults
from slurm_health.hooks.log import Log
from slurm_health.hooks.run_checks import choose, node_name, run_checks, running
from slurm_health.site_settings import Site

# Of the job's environment, what checks go by: a test without it is another test.
_EXPECTED = ("SLURM_JOB_GPUS",)

if TYPE_CHECKING:
    from slurm_health.draining.drain import Cause
    from slurm_health.slurm.client import Client


class Hook:
    """One run of one hook on this node."""

    def __init__(self, site: Site, environ: Mapping[str, str], context: CheckContext) -> None:
        self.site = site
        self.environ = environ
        self.context = context
        self.name = context.context
        self.node = node_name(environ)
        self.log = Log(self.name, self.node, environ.get("SLURM_JOB_ID", ""))

    def faults(self) -> list[CheckResult]:
        """Run the checks of this hook and return the proven faults of the node."""
        partition = self.environ.get("SLURM_JOB_PARTITION")
        chosen = choose(self.site.checks, context=self.name, node=self.node, partition=partition)
        results = run_checks(running(chosen), self.context)
        self.log.results(results)
        return node_faults(results)

    def retest(self, checks: Sequence[Planned]) -> list[CheckResult]:
        """Run these checks, whichever hook they are for."""
        return run_checks(checks, msgspec.structs.replace(self.context, context="retest"))

    def controller(self) -> Client:
        """Return slurmctld, as hooks ask it."""
        from slurm_health.slurm.client import Client

        return Client.for_hook(self.environ, limit_s=self.site.hooks.slurm_limit_s)

    def cause(self, faults: Sequence[CheckResult]) -> Cause:
        """Return the cause for a drain that failed checks are."""
        from slurm_health.draining.drain import Cause

        names = tuple(each.name for each in faults)
        return Cause(
            checks=names,
            text="; ".join(each.finding.text for each in faults),
            retest=names,
            expected={name: self.environ[name] for name in _EXPECTED if name in self.environ},
            job=number(self.environ, "SLURM_JOB_ID", 0),
            uid=number(self.environ, "SLURM_JOB_UID", -1),
            hook=self.name,
        )

    def drain(self, cause: Cause) -> bool:
        """Drain this node when everybody agrees; tell whether jobs are kept away from it now."""
        from slurm_health.draining.drain import DrainStatus, drain_this_node

        result = drain_this_node(
            self.site, self.node, cause, controller=self.controller(), now_s=self.context.now_s
        )
        self.log.error(f"{result.status.value}: {result.text}")
        return result.status is not DrainStatus.NOT_DRAINED


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a number that Slurm puts into the environment."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
