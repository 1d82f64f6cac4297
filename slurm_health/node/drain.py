# SPDX-License-Identifier: Apache-2.0
"""The one way to take a node out of the pool, and the one way to return it.

A drain asks Slurm who holds the node, asks the breaker, reads the node again, sets our note, and
verifies. Only our own drain is lifted, only with our note unedited, and only if nothing else holds
the node. The node keeps a record of its drain, written before the drain: a hook that is killed in
between has drained nothing, or left a record of it.
"""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node import notify, shared
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import breaker, drain_note, slurm_drain
from slurm_health.node.rules.breaker import DrainEntry, DrainLedger, Reservation
from slurm_health.node.rules.drain_note import DrainNote
from slurm_health.node.rules.recovery import BootTime, DrainRecord
from slurm_health.node.rules.slurm_drain import SlurmDrain
from slurm_health.node.shared import StoreSilent, StoreUnusable
from slurm_health.node.site import Site
from slurm_health.node.state import (
    AGAIN_LIMIT_S,
    drain_lock,
    load_record,
    save,
)
from slurm_health.records.errors import SlurmCommandError, SlurmError, SlurmTimeoutError
from slurm_health.records.text import counted

if TYPE_CHECKING:  # a health check loads this every time, and seldom asks Slurm
    from slurm_health.system.slurm.client import Client
    from slurm_health.system.slurm.parsing import Node

_LEDGER_TEXT = 500
# The words of scontrol if slurmctld took a request and was too slow, or died, to answer it.
_NO_ANSWER = re.compile(r"timed out|Zero Bytes", re.IGNORECASE)
# Nodes that all lose their shared filesystem at once cannot count one another, and ask Slurm spread
# over so many times as long: 9 s.
_SPREAD_WITHOUT_LEDGER = 3
# So many nodes with the same fault on a silent shared filesystem are a server's problem.
_MOST_WITHOUT_LEDGER = 2
# Slurm itself drains a node whose prolog or epilog fails, and leaves another's note on it.
_SLURM_DRAINS_AFTER = ("prolog", "epilog")
# A node that is drained more often within a day waits for an administrator: its
# test misses the fault.
_PER_DAY = 3


class DrainStatus(Enum):
    """What became of a drain."""

    DRAINED = "drained"
    ALREADY_OUT = "already_out"  # it was drained before, by anyone; that note stands
    FOREIGN_NOTE = "foreign_note"  # in the pool with another's note on it, which stays
    NOT_DRAINED = "not_drained"
    UNCLEAR = "unclear"  # Slurm has not answered the request, and may still drain it


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a drain, with words for the log."""

    status: DrainStatus
    text: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node is drained, after which job, and which checks return it.

    Args:
        checks: that failed; of a job's check, the component.
        text: what is wrong.
        retest: checks that must pass again; empty if no check can clear the node, and an
            administrator releases it.
        expected: variables of the job's environment that the checks depended on.
        confirms: the component that the job's own check accused, if this confirms it.
        job: after which job; 0 for none.
        uid: the job's user; -1 without a job.
        hook: that drains.
        measured: when, by the kernel's clock.
    """

    checks: tuple[str, ...]
    text: str
    retest: tuple[str, ...] = ()
    expected: dict[str, str] = {}
    confirms: str = ""
    job: int = 0
    uid: int = -1
    hook: str = ""
    measured: BootTime | None = None


# --- drain ---------------------------------------------------------------------------------------


def drain_this_node(
    site: Site, node: str, cause: Cause, *, controller: Client, now_s: float
) -> DrainResult:
    """Drain the node this hook runs on, and keep that on it, so that it can come back."""
    # When a cluster fails at once, the first trip the breaker and the others see it.
    time.sleep(site.timing.spread_s * _spread(node))
    try:
        with drain_lock(site.state):
            return drain_node(
                site, node, cause, controller=controller, now_s=now_s, state=site.state
            )
    except StoreUnusable as err:
        return _not_drained(str(err))


def drain_node(
    site: Site,
    node: str,
    cause: Cause,
    *,
    controller: Client,
    now_s: float,
    state: Path | None = None,
) -> DrainResult:
    """Drain a node if its holder, the breaker and Slurm agree.

    Args:
        site: the config file.
        node: its name in Slurm.
        cause: why.
        controller: Slurm.
        now_s: the time.
        state: where this node keeps what it was drained for; None on another node.
    """
    return _Draining(site, node, cause, controller, now_s, state).run()


class _Draining:
    """One drain of one node, from the first question to the last."""

    def __init__(
        self,
        site: Site,
        node: str,
        cause: Cause,
        controller: Client,
        now_s: float,
        state: Path | None,
    ) -> None:
        self._site = site
        self._node = node
        self._cause = cause
        self._controller = controller
        self._now_s = now_s
        self._state = state
        note = DrainNote(checks=cause.checks, job=cause.job, time_s=int(now_s), text=cause.text)
        self._entry = DrainEntry(
            node=node,
            time_s=now_s,
            job=cause.job,
            uid=cause.uid,
            checks=cause.checks,
            text=cause.text[:_LEDGER_TEXT],
            hook=cause.hook,
            note=drain_note.write(note),
        )
        self._racks: dict[str, Collection[str]] = {}

    def run(self) -> DrainResult:
        """Ask ledger and Slurm, count the drain, and perform it."""
        why_not, silent = "", ""
        try:
            why_not = self._known_refusal()
        except StoreSilent as err:  # the shared filesystem does not answer
            if self._state is None:
                return _not_drained(f"could not use the breaker's ledger: {err}")
            silent = str(err)
            # Nodes that all lose it at once must not ask Slurm at once.
            spread_s = _SPREAD_WITHOUT_LEDGER * self._site.timing.spread_s
            time.sleep(spread_s * _spread(self._node))
        except StoreUnusable as err:
            why_not = f"could not use the breaker's ledger: {err}"
        if why_not:
            return _not_drained(why_not)
        try:
            nodes = self._controller.nodes()
            now = nodes.get(self._node)
            if now is None:
                return _not_drained(f"Slurm does not know a node {self._node}")
            if (done := self._out_already(now)) is not None:
                return done
            self._entry = msgspec.structs.replace(self._entry, partitions=now.partitions)
            leaves = self._controller.leaves()
            self._racks = {leaf: names for leaf, names in leaves.items() if self._node in names}
            if silent:
                reserved = self._by_slurms_list(nodes, _drained_by_us(nodes))
            else:
                reserved = self._reserve(nodes)
        except SlurmError as err:
            return _not_drained(f"could not query Slurm: {err}")
        except StoreUnusable as err:
            return _not_drained(f"could not use the breaker's ledger: {err}")
        if reserved.tripped:
            self._send(EventKind.BREAKER, reserved.why_not)
        if reserved.why_not:
            return _not_drained(f"{reserved.why_not}{'; ' if silent else ''}{silent}")
        result = self._perform(reserved.today)
        if silent and result.status is DrainStatus.DRAINED:
            return self._give_way(result)
        nothing = {DrainStatus.NOT_DRAINED, DrainStatus.ALREADY_OUT}
        if self._cause.hook not in _SLURM_DRAINS_AFTER:
            nothing.add(DrainStatus.FOREIGN_NOTE)
        if not silent and result.status in nothing:
            with contextlib.suppress(StoreUnusable):  # then it goes on counting
                shared.change_ledger(
                    self._site,
                    lambda ledger: (breaker.take_back(ledger, self._node, self._now_s), None),
                    type(None),
                )
        return result

    def _known_refusal(self) -> str:
        """Return why the site or the ledger rules a drain out; empty if Slurm has to be asked.

        When a whole cluster fails, this is all that most nodes do.
        """
        site = self._site
        if not site.hooks.drain:
            return "hooks.drain is false"
        if not site.breaker.directory:
            return "breaker.directory is not set, so the number of other drained nodes is unknown"

        def refusal() -> str:
            ledger = shared.read_ledger(site.breaker)
            return breaker.refusal(ledger, self._entry, name_of=shared.user_name)

        return shared.in_child(site, refusal, str)

    def _decide(
        self, ledger: DrainLedger, nodes: Mapping[str, Node], ours: Mapping[str, Collection[str]]
    ) -> Reservation:
        partitions = self._entry.partitions
        members = {
            partition: [node.name for node in nodes.values() if partition in node.partitions]
            for partition in partitions
        }
        return breaker.reserve(
            ledger,
            self._entry,
            limits=self._site.breaker,
            members=members or {"the cluster": list(nodes)},
            ours=ours,
            racks=self._racks,
            name_of=shared.user_name,
        )

    def _reserve(self, nodes: Mapping[str, Node]) -> Reservation:
        """Count a drain before it happens, if it may."""

        def change(ledger: DrainLedger) -> tuple[DrainLedger, Reservation]:
            reserved = self._decide(ledger, nodes, _drained_by_us(nodes))
            return reserved.ledger, msgspec.structs.replace(reserved, ledger=DrainLedger())

        return shared.change_ledger(self._site, change, Reservation)

    def _by_slurms_list(
        self, nodes: Mapping[str, Node], ours: Mapping[str, Collection[str]]
    ) -> Reservation:
        """Decide by Slurm's list alone, if the filesystem that has the ledger does not answer."""
        alike = self._alike(ours)
        if len(alike) >= _MOST_WITHOUT_LEDGER:
            checks = ", ".join(self._entry.checks)
            why = f"{counted(len(alike), 'other node')} are drained for {checks}"
            why = f"{why}: a problem of the server, not of this node"
            return Reservation(ledger=DrainLedger(), why_not=why)
        decided = self._decide(DrainLedger(), nodes, ours)
        # Without the ledger, no node knows whether another has reported the trip.
        return msgspec.structs.replace(decided, tripped=False)

    def _alike(self, ours: Mapping[str, Collection[str]]) -> list[str]:
        """Return the other nodes that are drained for the same."""
        wanted = set(self._entry.checks)
        return [n for n, checks in ours.items() if n != self._node and wanted & set(checks)]

    def _give_way(self, result: DrainResult) -> DrainResult:
        """Lift this node's own drain if the earlier ones reach the limit.

        Nodes that cannot count one another may drain in the same second. The later one gives way:
        by time, then by name.
        """
        mine = (int(self._now_s), self._node)
        try:
            nodes = self._controller.nodes()
            earlier = {
                name: node
                for name, node in nodes.items()
                if (note := drain_note.parse(node.reason)) is not None
                and (note.time_s, name) < mine
            }
            before = _drained_by_us(earlier)
            reserved = self._by_slurms_list(nodes, before)
            if reserved.why_not:
                problem = undrain(self._controller, nodes[self._node])
                if not problem and self._state is not None:
                    save(self._state, drained=None)
                lifted = f"lifted again: {reserved.why_not}"
                return _not_drained(f"could not be {lifted}: {problem}" if problem else lifted)
        except SlurmError as err:
            text = f"{result.text} (the number of other drained nodes is unknown: {err})"
            return msgspec.structs.replace(result, text=text)
        alike = self._alike(before)
        if len(alike) == _MOST_WITHOUT_LEDGER - 1:
            text = f"{', '.join([*alike, self._node])}: {self._cause.text}"
            problem = "a problem of the server; no more nodes are drained for it"
            self._send(EventKind.BREAKER, f"{text}: {problem}")
        return result

    def _perform(self, today: int) -> DrainResult:
        """Drain a node that may be, for the `today`th time within a day, and notify."""
        many, cause = today > _PER_DAY, self._cause
        record = DrainRecord(
            node=self._node,
            reason=self._entry.note,
            retest=() if many else cause.retest,
            time_s=self._now_s,
            expected=cause.expected,
            measured=cause.measured,
        )
        try:
            # Again: an administrator may have drained it since, as the ledger takes seconds.
            now = self._controller.node(self._node)
        except SlurmError as err:
            return _not_drained(f"Slurm refused, or did not answer: {err}")
        if (done := self._out_already(now)) is not None:
            return done
        if now.reason and not drain_note.is_ours(now.reason):
            text = f"it has a note already: {now.reason}"
            return DrainResult(status=DrainStatus.FOREIGN_NOTE, text=text)
        lost = self._save(record)
        try:
            self._controller.drain([self._node], record.reason)
            after = self._controller.node(self._node)  # Slurm's return codes prove nothing
        except SlurmError as err:
            if isinstance(err, SlurmCommandError):
                may_happen_yet = _NO_ANSWER.search(err.stderr) is not None
            else:
                may_happen_yet = isinstance(err, SlurmTimeoutError)
            if not may_happen_yet:
                return _not_drained(f"Slurm refused, or did not answer: {err}")
            # It goes on counting: a late slurmctld performs every drain that it was sent, and a
            # cluster that fails meanwhile would be drained whole, one node in another's place.
            text = f"Slurm has not confirmed it, and may do it yet: {err}"
            return DrainResult(status=DrainStatus.UNCLEAR, text=text)
        if not after.out_of_pool:
            return _not_drained("Slurm accepted the request, but the node is still in the pool")
        self._save(msgspec.structs.replace(record, confirmed=True))
        self._send(EventKind.RELAPSE if today > 1 else EventKind.DRAINED, cause.text)
        often = f" (drain {today} within a day: an administrator has to release it)"
        text = f"{record.reason}{lost}{often if many else ''}"
        return DrainResult(status=DrainStatus.DRAINED, text=text)

    def _out_already(self, now: Node) -> DrainResult | None:
        """Return the result for a node that is out of the pool without this drain; else None.

        A node that was drained for the same job before was drained by another hook, or by the job's
        check, which knew no test for it.
        """
        reason, cause = now.reason or "(no reason)", self._cause
        if not now.out_of_pool:
            return None
        if not now.drained:
            return _not_drained(f"it is already {now.state}: {reason}")
        note = drain_note.parse(now.reason)
        if note is None or not cause.job or note.job != cause.job:
            return DrainResult(status=DrainStatus.ALREADY_OUT, text=f"{now.state}: {reason}")
        lost = ""
        if note.checks == (cause.confirms,):
            record = DrainRecord(
                node=now.name,
                reason=drain_note.unsigned(now.reason),
                retest=cause.retest,
                time_s=self._now_s,
                expected=cause.expected,
                measured=cause.measured,
                confirmed=True,
            )
            lost = self._save(record)
        return DrainResult(status=DrainStatus.DRAINED, text=reason + lost)

    def _save(self, record: DrainRecord) -> str:
        """Save a record on the node; return a remark for the log if that fails."""
        if self._state is None or save(self._state, drained=record):
            return ""
        return f" (no record in {self._state}: it will not be released by itself)"

    def _send(self, kind: EventKind, text: str) -> None:
        cause = self._cause
        event = NodeEvent(kind, self._node, self._now_s, text, checks=cause.checks, job=cause.job)
        notify.send(self._site, event)


def _drained_by_us(nodes: Mapping[str, Node]) -> dict[str, tuple[str, ...]]:
    """Return the nodes that are out of the pool with a note of ours, and the checks it names.

    Waves of Slurm's own drains count as well, so that ours do not come on top of them.
    """
    by_slurm = [drain for node in nodes.values() if (drain := by_slurm_itself(node)) is not None]
    return slurm_drain.waves_in(by_slurm) | {
        node.name: note.checks if (note := drain_note.parse(node.reason)) else ()
        for node in nodes.values()
        if node.out_of_pool and drain_note.is_ours(node.reason)
    }


def by_slurm_itself(node: Node, record: SlurmDrain | None = None) -> SlurmDrain | None:
    """Return the drain that Slurm itself has set on a node, with its record if it has one.

    None if the node is in the pool, if the drain is ours, or an administrator's.
    """
    reason, _, since = drain_note.signed(node.reason)
    if not node.out_of_pool or not reason or drain_note.is_ours(reason):
        return None
    since_s = 0.0
    with contextlib.suppress(ValueError, OverflowError, OSError):
        since_s = datetime.fromisoformat(since).timestamp()
    text = drain_note.unsigned(node.reason)
    drain = slurm_drain.bound(record, text, since, since_s, node.name)
    return None if drain is None else msgspec.structs.replace(drain, state=node.state)


def _spread(node: str) -> float:
    """Return the node's place in a span of time, from 0 to 1, by its name."""
    return zlib.crc32(node.encode()) / (1 << 32)


def _not_drained(why: str) -> DrainResult:
    return DrainResult(status=DrainStatus.NOT_DRAINED, text=why)


# --- return --------------------------------------------------------------------------------------


def release_own(site: Site, kept: DrainRecord, controller: Client) -> str:
    """Resume this node if it is as we drained it; return the outcome for the log."""

    def why_not(now: Node) -> str:
        current = load_record(site.state)
        if current is None or current.reason != kept.reason:
            return "it was drained again meanwhile"
        if not now.drained or drain_note.unsigned(now.reason) != kept.reason:
            save(site.state, drained=None)
            return f"another process changed the drain: {now.state}: {now.reason or '(no reason)'}"
        if not now.releasable:
            # Ask again after as many passes, not every time.
            save(site.state, drained=msgspec.structs.replace(kept, passes=0))
            return f"it is {now.state}"
        return ""

    if problem := lift(site, kept.node, controller, why_not):
        return f"not released: {problem}"
    after = ", ".join(kept.retest) or "the test of [repair]"
    passes = f"{kept.passes} {'pass' if kept.passes == 1 else 'passes'} of "
    text = f"released after {passes if kept.retest else ''}{after}"
    time_s = max(kept.passed_s, kept.time_s)
    released = NodeEvent(EventKind.RELEASED, kept.node, time_s, text, checks=kept.retest)
    notify.send(site, released)
    return text


def lift(
    site: Site,
    node: str,
    controller: Client,
    why_not: Callable[[Node], str],
    **changes: object,
) -> str:
    """Return this node to service; return what went wrong, empty for nothing.

    `why_not` decides by the node as Slurm shows it now, while no other hook of this node drains or
    releases it; `changes` are those of its state, beside the end of its drain.
    """
    try:
        with drain_lock(site.state, AGAIN_LIMIT_S):
            now = controller.node(node)
            problem = why_not(now) or undrain(controller, now)
            if not problem:
                save(site.state, drained=None, **changes)
    except (SlurmError, StoreUnusable) as err:
        return str(err)
    return problem


def undrain(controller: Client, now: Node) -> str:
    """Return a node to service, and verify that; return what went wrong, empty for nothing."""
    try:
        if now.drained:
            controller.undrain(now.name)
        else:
            controller.resume(now.name)
        after = controller.node(now.name)
    except SlurmError as err:
        return str(err)
    return f"it is still {after.state}" if after.drained or "DOWN" in after.states else ""


def count_return(site: Site, node: str) -> None:
    """Count that an administrator has returned a node; if that fails, its drain still counts."""
    if site.breaker.directory:
        with contextlib.suppress(StoreUnusable):
            shared.change_ledger(
                site, lambda ledger: (breaker.with_return(ledger, node), None), type(None)
            )
