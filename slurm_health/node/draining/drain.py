# SPDX-License-Identifier: Apache-2.0
"""Drain a node: ask who holds it, ask the breaker, look again, set our note, look again."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from enum import Enum

import msgspec

from slurm_health.node import notify
from slurm_health.node.draining import own_drain, shared_state
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.breaker import DrainEntry
from slurm_health.node.rules.drain_note import DrainNote
from slurm_health.node.rules.recovery import BootTime, DrainRecord
from slurm_health.node.site_settings import Site
from slurm_health.records.errors import SlurmCommandError, SlurmError, SlurmTimeoutError
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node

_LEDGER_TEXT = 500
# What scontrol says when slurmctld took a request and was too slow, or died, to answer it.
_NO_ANSWER = re.compile(r"timed out|Zero Bytes", re.IGNORECASE)


class DrainStatus(Enum):
    """What became of the wish to drain."""

    DRAINED = "drained"
    ALREADY_OUT = "already_out"  # somebody, or we, drained it before; their note stands
    FOREIGN_NOTE = "foreign_note"  # in the pool with somebody's note on it, which stays
    NOT_DRAINED = "not_drained"
    UNCLEAR = "unclear"  # Slurm was told to, and has not answered: it may still do it


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it, in words for the log."""

    status: DrainStatus
    text: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why, after which job, and which checks have to pass before the node may come back.

    Args:
        checks: what found it; of a job's check, the component.
        text: what is wrong.
        retest: empty when no check of this node can tell: then only a person brings it back.
        expected: what the checks went by beside the site's file: variables of the job.
        confirms: the component that the job's own check accused, where this confirms it.
        found: when, by the kernel's clock.
    """

    checks: tuple[str, ...]
    text: str
    retest: tuple[str, ...] = ()
    expected: dict[str, str] = {}
    confirms: str = ""
    job: int = 0
    uid: int = -1
    hook: str = ""
    found: BootTime | None = None


def drain_this_node(
    site: Site, node: str, cause: Cause, *, controller: Client, now_s: float
) -> DrainResult:
    """Drain the node this hook runs on, and remember it there, so that it can come back."""
    why_not = _why_not(site, node, cause, now_s)
    if why_not:
        return _not_drained(why_not)
    # When a cluster fails at once, the first trip the breaker and the rest see it.
    time.sleep(site.breaker.spread_s * zlib.crc32(node.encode()) / (1 << 32))

    def remember(record: DrainRecord) -> str:
        if own_drain.remember(site.state, record):
            return ""
        return f" (no record in {site.state}: it will not be released by itself)"

    try:
        with own_drain.alone(site.state):
            return drain_node(
                site, node, cause, controller=controller, now_s=now_s, remember=remember
            )
    except shared_state.SharedStateUnusable as err:
        return _not_drained(str(err))


def drain_node(
    site: Site,
    node: str,
    cause: Cause,
    *,
    controller: Client,
    now_s: float,
    remember: Callable[[DrainRecord], str] = lambda _record: "",
) -> DrainResult:
    """Drain a node when everybody agrees, and say what became of it.

    What is to be known afterwards is remembered before the drain: whoever is killed in between has
    drained nothing, or is known to have.

    Args:
        site: the site's file.
        node: its name in Slurm.
        cause: why.
        controller: Slurm.
        now_s: the time.
        remember: keeps the record on the node; answers what to add to the result.
    """
    why_not = _why_not(site, node, cause, now_s)
    if why_not:
        return _not_drained(why_not)
    try:
        nodes = controller.nodes()
        now = nodes.get(node)
        if now is None:
            return _not_drained(f"Slurm does not know a node {node}")
        found = _out_already(now, cause, remember, now_s)
        if found is not None:
            return found
        reserved = shared_state.reserve_drain(
            site,
            _entry(node, cause, now_s, now.partitions),
            members=_members(nodes, now.partitions) or {"the cluster": list(nodes)},
            ours=_drained_by_us(nodes),
            racks=_racks(controller, node),
        )
    except SlurmError as err:
        return _not_drained(f"could not query Slurm: {err}")
    if reserved.tripped:
        _tell(site, node, EventKind.BREAKER, reserved.why_not, cause, now_s)
    if reserved.why_not:
        return _not_drained(reserved.why_not)
    return _drained(site, node, cause, reserved.today, controller, remember, now_s)


def _drained(
    site: Site,
    node: str,
    cause: Cause,
    today: int,
    controller: Client,
    remember: Callable[[DrainRecord], str],
    now_s: float,
) -> DrainResult:
    """Drain a node that may be, for the `today`th time within a day, and tell of it."""
    many = today > site.recovery.per_day
    record = _record(node, msgspec.structs.replace(cause, retest=()) if many else cause, now_s)
    result = _perform(record, cause, controller, remember)
    if result.status is DrainStatus.DRAINED:
        kind = EventKind.RELAPSE if today > 1 else EventKind.DRAINED
        _tell(site, node, kind, cause.text, cause, now_s)
    elif result.status in (DrainStatus.NOT_DRAINED, DrainStatus.ALREADY_OUT):
        shared_state.cancel_drain(site, node, now_s)
    if many and result.status is DrainStatus.DRAINED:
        text = f"{result.text} (drain {today} within a day: a person has to release it)"
        return msgspec.structs.replace(result, text=text)
    return result


def _tell(site: Site, node: str, kind: EventKind, text: str, cause: Cause, now_s: float) -> None:
    event = NodeEvent(
        kind=kind, node=node, time_s=now_s, text=text, checks=cause.checks, job=cause.job
    )
    notify.send(site, event)


def _why_not(site: Site, node: str, cause: Cause, now_s: float) -> str:
    """Say why nothing is to be drained, without a question to Slurm; empty for no reason."""
    if not site.hooks.drain:
        return "hooks.drain is false"
    if not site.breaker.directory:
        return "breaker.directory is not set, so the number of other drained nodes is unknown"
    return shared_state.known_refusal(site, _entry(node, cause, now_s))


def _entry(node: str, cause: Cause, now_s: float, partitions: tuple[str, ...] = ()) -> DrainEntry:
    return DrainEntry(
        node=node,
        time_s=now_s,
        partitions=partitions,
        job=cause.job,
        uid=cause.uid,
        checks=cause.checks,
        text=cause.text[:_LEDGER_TEXT],
        hook=cause.hook,
        note=_note(cause, now_s),
    )


def _note(cause: Cause, now_s: float) -> str:
    note = DrainNote(checks=cause.checks, job=cause.job, time_s=int(now_s), text=cause.text)
    return drain_note.write(note)


def _record(node: str, cause: Cause, now_s: float) -> DrainRecord:
    return DrainRecord(
        node=node,
        reason=_note(cause, now_s),
        retest=cause.retest,
        time_s=now_s,
        expected=cause.expected,
        found=cause.found,
    )


def _out_already(
    now: Node, cause: Cause, remember: Callable[[DrainRecord], str], now_s: float
) -> DrainResult | None:
    """Say what became of a node that is out of the pool without this drain; None for one in it."""
    reason = now.reason or "(no reason)"
    if not now.out_of_pool:
        return None
    if not now.drained:
        return _not_drained(f"it is already {now.state}: {reason}")
    note = drain_note.parse(now.reason)
    if note is None or not cause.job or note.job != cause.job:
        return DrainResult(status=DrainStatus.ALREADY_OUT, text=f"{now.state}: {reason}")
    # Drained for this job before: by a hook, or by the job's check, which knew no test for it.
    lost = ""
    if note.checks == (cause.confirms,):
        kept = _record(now.name, cause, now_s)
        unsigned = drain_note.unsigned(now.reason)
        lost = remember(msgspec.structs.replace(kept, reason=unsigned, confirmed=True))
    return DrainResult(status=DrainStatus.DRAINED, text=reason + lost)


def _perform(
    record: DrainRecord,
    cause: Cause,
    controller: Client,
    remember: Callable[[DrainRecord], str],
) -> DrainResult:
    try:
        # Again: the ledger may have kept us waiting, and an administrator does not wait for it.
        now = controller.node(record.node)
    except SlurmError as err:
        return _did_not_answer(err)
    found = _out_already(now, cause, remember, record.time_s)
    if found is not None:
        return found
    if now.reason and not drain_note.is_ours(now.reason):
        text = f"it has a note already: {now.reason}"
        return DrainResult(status=DrainStatus.FOREIGN_NOTE, text=text)
    lost = remember(record)
    try:
        controller.drain([record.node], record.reason)
    except SlurmError as err:
        return _unclear(err) if _may_happen_yet(err) else _did_not_answer(err)
    try:
        after = controller.node(record.node)  # Slurm's return codes prove nothing
    except SlurmError as err:
        return _unclear(err)
    if not after.out_of_pool:
        return _not_drained("Slurm accepted the request, but the node is still in the pool")
    remember(msgspec.structs.replace(record, confirmed=True))
    return DrainResult(status=DrainStatus.DRAINED, text=record.reason + lost)


def _may_happen_yet(err: SlurmError) -> bool:
    """Tell whether Slurm may have got, or still get, to what it was asked and did not answer."""
    if isinstance(err, SlurmCommandError):
        return _NO_ANSWER.search(err.stderr) is not None
    return isinstance(err, SlurmTimeoutError)


def _unclear(err: SlurmError) -> DrainResult:
    # It goes on counting: a slurmctld that is late drains all that it was told to, and a cluster
    # that fails meanwhile would be drained whole, each node in the place of the one before.
    text = f"Slurm has not said whether it did, and may do it yet: {err}"
    return DrainResult(status=DrainStatus.UNCLEAR, text=text)


def _members(nodes: Mapping[str, Node], partitions: Collection[str]) -> dict[str, list[str]]:
    return {
        partition: [each.name for each in nodes.values() if partition in each.partitions]
        for partition in partitions
    }


def _racks(controller: Client, node: str) -> dict[str, tuple[str, ...]]:
    return {leaf: nodes for leaf, nodes in controller.leaves().items() if node in nodes}


def _drained_by_us(nodes: Mapping[str, Node]) -> list[str]:
    return [
        each.name for each in nodes.values() if each.out_of_pool and drain_note.is_ours(each.reason)
    ]


def _did_not_answer(err: SlurmError) -> DrainResult:
    return _not_drained(f"Slurm refused, or did not answer: {err}")


def _not_drained(why: str) -> DrainResult:
    return DrainResult(status=DrainStatus.NOT_DRAINED, text=why)
