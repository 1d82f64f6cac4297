# SPDX-License-Identifier: Apache-2.0
"""What prolog, epilog and health check share: their context, their checks and their log.

On a healthy node a hook asks Slurm nothing and loads nothing that only a drain needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node import STATE_FILE
from slurm_health.node.checks.check import CheckContext, Planned
from slurm_health.node.log import Log
from slurm_health.node.rules.finding import CheckResult, inconclusive, warned
from slurm_health.node.run import (
    after_drain,
    chosen,
    node_name,
    run_checks,
)
from slurm_health.node.site import Site
from slurm_health.records.errors import SlurmError
from slurm_health.records.text import whole_number

# Variables of the job's environment that change what the checks measure.
_EXPECTED = ("SLURM_JOB_GPUS",)

if TYPE_CHECKING:
    from slurm_health.node.drain import Cause
    from slurm_health.node.rules.recovery import DrainRecord
    from slurm_health.system.slurm.client import Client
    from slurm_health.system.slurm.parsing import Node as SlurmNode


class Hook:
    """One run of one hook on this node.

    Args:
        site: the config file.
        environ: the hook's environment.
        context: the machine.
        give_up_s: Slurm is asked nothing after this time of the monotonic clock.

    Attributes:
        results: of the checks that ran.
        held_by: state and reason that keep this node out of the pool, if Slurm was asked.
        slurm_node: this node in Slurm, if Slurm was asked because of our drain.
    """

    def __init__(
        self,
        site: Site,
        environ: Mapping[str, str],
        context: CheckContext,
        *,
        give_up_s: float = math.inf,
    ) -> None:
        self.site = site
        self.environ = environ
        self.context = _with_return_time(context)
        self.name = context.context
        self._give_up_s = give_up_s
        self.node = node_name(environ)
        self.log = Log(self.name, self.node, environ.get("SLURM_JOB_ID", ""))
        self.results: list[CheckResult] = []
        self.held_by = ""
        self._client: Client | None = None
        self.slurm_node: SlurmNode | None = None

    def check(self) -> list[CheckResult]:
        """Run the checks of this hook, log and return their results."""
        partition = self.environ.get("SLURM_JOB_PARTITION")
        planned = chosen(self.site.planned, self.name, self.node, partition)
        self.results = run_checks(planned, self.context)
        if self.site.trouble:
            text = f"{self.site.trouble}; the last good settings are used"
            self.results.append(CheckResult(name="config", finding=warned(text)))
        self.log.results(self.results)
        return self.results

    def _expected(self) -> dict[str, str]:
        return {name: self.environ[name] for name in _EXPECTED if name in self.environ}

    def retest(
        self, checks: Sequence[Planned], drained: DrainRecord | None = None
    ) -> list[CheckResult]:
        """Run these checks, whichever hook they are for; after a drain, as `after_drain` says.

        Exclusive checks run one by one, and only on an idle node.
        """
        place = msgspec.structs.replace(self.context, context="retest")
        if drained is not None:
            place = after_drain(place, drained)
        results = run_checks([check for check in checks if not check.exclusive], place)
        exclusive, why_not = [check for check in checks if check.exclusive], ""
        if exclusive:
            try:
                now = self.controller().node(self.node)
                if not now.idle:
                    why_not = f"it needs an idle node, and this one is {now.state}"
            except SlurmError as err:
                why_not = f"it needs an idle node, and Slurm cannot be asked: {err}"
        for check in exclusive:
            skipped = CheckResult(
                name=check.name, finding=inconclusive(why_not), shadow=check.shadow
            )
            results += [skipped] if why_not else run_checks([check], place)
        return results

    def controller(self) -> Client:
        """Return a client of slurmctld with the limits of a hook."""
        from slurm_health.system.slurm.client import Client

        if self._client is None:
            limit_s = self.site.timing.slurm_s
            self._client = Client.for_hook(self.environ, limit_s=limit_s, give_up_s=self._give_up_s)
        return self._client

    def sync_drain(self) -> bool:
        """Compare our drain of this node with Slurm; return whether an administrator lifted it.

        The record of a drain that was lifted is deleted, and so is one with another note by now:
        that drain is its editor's. If Slurm itself has overwritten the note, the record waits: both
        causes must be gone. Lifting it means that the node is repaired, so records of the past,
        such as the kernel's log, count from now on.
        """
        from slurm_health.node import state

        directory = self.site.state
        if state.load_record(directory, self.node) is None:
            if (other := state.load_record(directory)) is not None:
                self.log.warning(
                    f"{directory} holds the drain of {other.node}: every node needs its own"
                    " directory (hooks.state), or none is released by itself"
                )
            return False
        from slurm_health.node import drain, notify
        from slurm_health.node.rules import drain_note, slurm_reasons
        from slurm_health.node.store import StoreUnusable

        try:
            with state.drain_lock(directory, state.AGAIN_LIMIT_S):
                kept = state.load_record(directory, self.node)
                if kept is None:
                    return False
                self.slurm_node = now = self.controller().node(self.node)
                if now.out_of_pool:
                    self.held_by = f"{now.state}: {now.reason or '(no reason)'}"
                    reason = drain_note.unsigned(now.reason)
                    if reason != kept.reason and slurm_reasons.kind_of(reason) is None:
                        state.save(directory, drained=None)
                        self.log.info(f"another process changed the drain: {self.held_by}")
                    return False
                returned = self.context.boot_time() if kept.confirmed else None
                state.save(directory, drained=None, **({"returned": returned} if returned else {}))
        except (SlurmError, StoreUnusable) as err:
            self.log.warning(f"could not query Slurm: {err}")
            return False
        drain.count_return(self.site, self.node)
        if not kept.confirmed:  # recorded before the attempt, and never drained
            self.log.info(f"a drain that was begun never took effect: {kept.reason}")
            return False
        text = "it was returned to the pool"
        self.log.info(text)
        kind, now_s = notify.EventKind.RELEASED, self.context.now_s
        notify.send(self.site, notify.NodeEvent(kind, self.node, now_s, text))
        self.context = _with_return_time(self.context)
        return True

    def cause(self, faults: Sequence[CheckResult]) -> Cause:
        """Return failed checks as the cause of a drain."""
        from slurm_health.node.drain import Cause

        names = tuple(fault.name for fault in faults)
        return Cause(
            checks=names,
            text="; ".join(fault.finding.text for fault in faults),
            retest=names,
            expected=self._expected(),
            job=number(self.environ, "SLURM_JOB_ID", 0),
            uid=number(self.environ, "SLURM_JOB_UID", -1),
            hook=self.name,
            measured=self.context.boot_time(),
        )

    def drain(self, cause: Cause) -> bool:
        """Drain this node if ledger and Slurm allow it; return whether it takes no jobs now."""
        from slurm_health.node.drain import DrainStatus, drain_this_node

        result = drain_this_node(
            self.site, self.node, cause, controller=self.controller(), now_s=self.context.now_s
        )
        self.log.error(f"{result.status.value}: {result.text}")
        return result.status not in (DrainStatus.NOT_DRAINED, DrainStatus.UNCLEAR)


def _with_return_time(context: CheckContext) -> CheckContext:
    """Return the context with the time when an administrator last returned this node."""
    if context.state is None or not (context.state / STATE_FILE).exists():
        return context
    from slurm_health.node.state import returned_uptime_s

    returned_s = returned_uptime_s(context.state, context.boot_time())
    return msgspec.structs.replace(context, returned_uptime_s=returned_s)


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a number that Slurm puts into the environment."""
    value = whole_number(environ.get(name, ""))
    return default if value is None else value
