# SPDX-License-Identifier: Apache-2.0
"""The frame that prolog, epilog and health check share: where they are, what they run and say.

On a node that is well it asks nobody anything, and loads nothing that only a drain needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node import STATE_FILE, passes
from slurm_health.node.checks.check import CheckContext, Planned
from slurm_health.node.hooks.log import Log
from slurm_health.node.rules.finding import WELL, CheckResult, inconclusive, warned
from slurm_health.node.run import (
    after_drain,
    chosen,
    node_name,
    run_again,
    run_checks,
)
from slurm_health.node.site import Site
from slurm_health.records.errors import SlurmError
from slurm_health.records.text import whole_number

# Of the job's environment, what checks go by: a test without it is another test.
_EXPECTED = ("SLURM_JOB_GPUS",)

if TYPE_CHECKING:
    from slurm_health.node.drain import Cause
    from slurm_health.node.rules.recovery import DrainRecord
    from slurm_health.system.slurm.client import Client
    from slurm_health.system.slurm.parsing import Node as SlurmNode


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
        self.context = _since_return(context)
        self.name = context.context
        self._give_up_s = give_up_s
        self.node = node_name(environ)
        self.log = Log(self.name, self.node, environ.get("SLURM_JOB_ID", ""))
        self.found: list[CheckResult] = []
        # Why no check was run, where something else is at work on this node.
        self.not_checked = ""
        # What keeps this node out of the pool, once Slurm has been asked.
        self.held_by = ""
        # How Slurm sees this node, once it has been asked because of a drain of ours.
        self.seen_by_slurm: SlurmNode | None = None

    def check(self) -> list[CheckResult]:
        """Run the checks of this hook, say what they find, and keep it in `found`."""
        # What the epilog looks for is what the job has left behind.
        kept = self.site.longest_pass_min > 0 and self.name != "epilog"
        passed = self._pass_so_far() if kept else None
        self.found = run_checks(self._chosen(), self.context)
        if self.site.trouble:
            text = f"{self.site.trouble}; the last good settings are used"
            self.found.append(CheckResult(name="config", finding=warned(text)))
        self.log.results(self.found)
        if self.site.metrics.syslog_json:
            self.log.verdicts(self.found)
        if any(each.status not in WELL for each in self.found):
            self.forget_passes()
        elif passed is not None:
            passes.add(self.site.passes, passed)
        return self.found

    def passed_lately(self) -> bool:
        """Tell whether this node has passed the checks of this hook so lately as to be let off."""
        within_s = 60 * self.site.hooks.passed_min
        if not within_s:
            return False
        found = passes.lately(
            self.site.passes, self.context.boot_time(), within_s, owner=os.geteuid()
        )
        wanted = self._pass_so_far() if found else None
        return wanted is not None and passes.covers(found, wanted)

    def forget_passes(self) -> None:
        """Have this node checked again, whatever it has passed: something was found since."""
        kept = self.site.longest_pass_min > 0
        if kept and not passes.revoke(self.site.passes, self.context.boot_time()):
            self.log.error(
                f"{self.site.passes} cannot be written: for {self.site.longest_pass_min:g} min"
                " this node may not be checked again"
            )

    def _chosen(self) -> list[Planned]:
        partition = self.environ.get("SLURM_JOB_PARTITION")
        return chosen(self.site.planned, self.name, self.node, partition)

    def _pass_so_far(self) -> passes.Pass | None:
        """Return a pass of this hook's checks that begins now, None where that is unknown."""
        began = self.context.boot_time()
        try:
            by = passes.site_mark(self.site.path)
        except OSError:
            return None
        names = frozenset(each.name for each in self._chosen())
        if began is None or not names:
            return None
        return passes.Pass(
            hook=self.name, checks=names, began=began, by=by, expected=self._expected()
        )

    def _expected(self) -> dict[str, str]:
        return {name: self.environ[name] for name in _EXPECTED if name in self.environ}

    def retest(
        self, checks: Sequence[Planned], drained: DrainRecord | None = None
    ) -> list[CheckResult]:
        """Run these checks, whichever hook they are for; after a drain, as `after_drain` says.

        Those that take the node for themselves run one by one, and only where no job is at work.
        """
        place = msgspec.structs.replace(self.context, context="retest")
        if drained is not None:
            place = after_drain(place, drained)
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
        from slurm_health.system.slurm.client import Client

        limit_s = self.site.timing.slurm_s
        return Client.for_hook(self.environ, limit_s=limit_s, give_up_s=self._give_up_s)

    def was_returned(self) -> bool:
        """Tell whether a person has returned this node after a drain of ours, and note that.

        A drain whose note somebody has changed since is theirs, and is forgotten here.
        """
        from slurm_health.node import state

        directory = self.site.state
        kept = state.recall(directory, self.node)
        if kept is None:
            self._warn_of_shared_state()
            return False
        from slurm_health.node import drain, notify
        from slurm_health.node.store import StoreUnusable

        try:
            now = drain.sync_with_slurm(
                directory, self.node, self.controller(), self.context.boot_time()
            )
        except (SlurmError, StoreUnusable) as err:
            self.log.warning(f"could not query Slurm: {err}")
            return False
        if now is None:
            return False
        self.seen_by_slurm = now
        if now.out_of_pool:
            self.held_by = f"{now.state}: {now.reason or '(no reason)'}"
            if state.recall(directory, self.node) is None:
                self.log.info(f"the drain is no longer ours: {self.held_by}")
            return False
        drain.count_return(self.site, self.node)
        if not kept.confirmed:  # recorded before it was tried, and nobody has seen it drained
            self.log.info(f"a drain that was begun never took effect: {kept.reason}")
            return False
        text = "it was returned to the pool"
        self.log.info(text)
        released = notify.NodeEvent(
            kind=notify.EventKind.RELEASED, node=self.node, time_s=self.context.now_s, text=text
        )
        notify.send(self.site, released)
        self.context = _since_return(self.context)
        return True

    def _warn_of_shared_state(self) -> None:
        from slurm_health.node import state

        other = state.recall(self.site.state)
        if other is not None:
            self.log.warning(
                f"{self.site.state} holds the drain of {other.node}: each node needs a directory"
                " of its own (hooks.state), or none is released by itself"
            )

    def cause(self, faults: Sequence[CheckResult]) -> Cause:
        """Return the cause for a drain that failed checks are."""
        from slurm_health.node.drain import Cause

        names = tuple(each.name for each in faults)
        return Cause(
            checks=names,
            text="; ".join(each.finding.text for each in faults),
            retest=names,
            expected=self._expected(),
            job=number(self.environ, "SLURM_JOB_ID", 0),
            uid=number(self.environ, "SLURM_JOB_UID", -1),
            hook=self.name,
            found=self.context.boot_time(),
        )

    def drain(self, cause: Cause) -> bool:
        """Drain this node when everybody agrees; tell whether jobs are kept away from it now."""
        self.forget_passes()
        from slurm_health.node.drain import DrainStatus, drain_this_node

        result = drain_this_node(
            self.site, self.node, cause, controller=self.controller(), now_s=self.context.now_s
        )
        self.log.error(f"{result.status.value}: {result.text}")
        return result.status not in (DrainStatus.NOT_DRAINED, DrainStatus.UNCLEAR)


def _since_return(context: CheckContext) -> CheckContext:
    """Return the context with what it must know of a person who returned this node."""
    if context.state is None or not (context.state / STATE_FILE).exists():
        return context
    from slurm_health.node.state import returned_uptime_s

    returned_s = returned_uptime_s(context.state, context.boot_time())
    return msgspec.structs.replace(context, returned_uptime_s=returned_s)


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a number that Slurm puts into the environment."""
    found = whole_number(environ.get(name, ""))
    return default if found is None else found
