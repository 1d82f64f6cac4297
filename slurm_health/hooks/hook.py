# SPDX-License-Identifier: Apache-2.0
"""The frame that prolog, epilog and health check share: where they are, what they run and say.

On a node that is well it asks nobody anything, and loads nothing that only a drain needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.checks.check import CheckContext, Planned
from slurm_health.core.node.finding import CheckResult, inconclusive
from slurm_health.core.text import whole_number
from slurm_health.errors import SlurmError
from slurm_health.hooks.log import Log
from slurm_health.hooks.run_checks import choose, node_name, run_again, run_checks, running
from slurm_health.site_settings import Site

# Of the job's environment, what checks go by: a test without it is another test.
_EXPECTED = ("SLURM_JOB_GPUS",)

if TYPE_CHECKING:
    from slurm_health.draining.drain import Cause
    from slurm_health.slurm.client import Client


class Hook:
    """One run of one hook on this node."""

    def __init__(
        self,
        site: Site,
        environ: Mapping[str, str],
        context: CheckContext,
        *,
        give_up_s: float = math.inf,
    ) -> None:
        """Make one. Slurm is asked nothing after `give_up_s` of the monotonic clock."""
        self.site = site
        self.environ = environ
        self.context = context
        self.name = context.context
        self._give_up_s = give_up_s
        self.node = node_name(environ)
        self.log = Log(self.name, self.node, environ.get("SLURM_JOB_ID", ""))
        self.found: list[CheckResult] = []

    def check(self) -> list[CheckResult]:
        """Run the checks of this hook, say what they find, and keep it in `found`."""
        partition = self.environ.get("SLURM_JOB_PARTITION")
        chosen = choose(self.site.checks, context=self.name, node=self.node, partition=partition)
        self.found = run_checks(running(chosen), self.context)
        self.log.results(self.found)
        if self.site.metrics.syslog_json:
            self.log.verdicts(self.found)
        return self.found

    def retest(
        self, checks: Sequence[Planned], expected: Mapping[str, str] | None = None
    ) -> list[CheckResult]:
        """Run these checks, whichever hook they are for, with what their first run was told.

        Those that take the node for themselves run one by one, and only where no job is at work.
        """
        environ = {**self.context.environ, **(expected or {})}
        place = msgspec.structs.replace(self.context, context="retest", environ=environ)
        exclusive = [each for each in checks if each.exclusive]
        why_not = self._busy() if exclusive else ""
        if not why_not:
            return run_again(checks, place)
        left_out = [
            CheckResult(name=each.name, finding=inconclusive(why_not), shadow=each.shadow)
            for each in exclusive
        ]
        return run_checks([each for each in checks if not each.exclusive], place) + left_out

    def _busy(self) -> str:
        """Return why this node is not to be had for a test alone, empty when it is."""
        try:
            now = self.controller().node(self.node)
        except SlurmError as err:
            return f"it needs an idle node, and Slurm cannot be asked: {err}"
        return "" if now.idle else f"it needs an idle node, and this one is {now.state}"

    def controller(self) -> Client:
        """Return slurmctld, as hooks ask it."""
        from slurm_health.slurm.client import Client

        limit_s = self.site.hooks.slurm_limit_s
        return Client.for_hook(self.environ, limit_s=limit_s, give_up_s=self._give_up_s)

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
    found = whole_number(environ.get(name, ""))
    return default if found is None else found
