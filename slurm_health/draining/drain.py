# SPDX-License-Identifier: Apache-2.0
"""Drain this node: ask Slurm who holds it, ask the breaker, set our note, look again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

import msgspec

from slurm_health.core.node import drain_note
from slurm_health.core.node.breaker import Entry
from slurm_health.core.node.drain_note import DrainNote
from slurm_health.core.node.recovery import DrainRecord
from slurm_health.draining import own_drain, shared_state
from slurm_health.errors import SlurmError
from slurm_health.site_settings import Site
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Node

_LEDGER_TEXT = 500


class DrainStatus(Enum):
    """What became of the wish to drain."""

    DRAINED = "drained"
    ALREADY_OUT = "already_out"  # somebody, or we, drained it before; their note stands
    FOREIGN_NOTE = "foreign_note"  # in the pool with somebody's note on it, which stays
    NOT_DRAINED = "not_drained"


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it, in words for the log."""

    status: DrainStatus
    text: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why, after which job, and which checks have to pass before the node may come back.

    `retest` is empty when no check of this node can tell: then only a person brings it back.
    """

    checks: tuple[str, ...]
    text: str
    retest: tuple[str, ...]
    expected: dict[str, str] = {}
    job: int = 0
    uid: int = -1
    hook: str = ""


def drain_this_node(
    site: Site, node: str, cause: Cause, *, controller: Client, now_s: float
) -> DrainResult:
    """Drain this node when everybody agrees, and say what became of it."""
    if not site.hooks.drain:
        return _not_drained("hooks.drain is false")
    if not site.breaker.directory:
        why = "breaker.directory is not set, so nobody knows how many others are drained"
        return _not_drained(why)
    try:
        nodes = controller.nodes()
    except SlurmError as err:
        return _not_drained(f"could not query Slurm: {err}")
    now = nodes.get(node)
    if now is None:
        return _not_drained(f"Slurm does not know a node {node}")
    reason = now.reason or "(no reason)"
    if now.drained:
        return DrainResult(status=DrainStatus.ALREADY_OUT, text=f"{now.state}: {reason}")
    if now.out_of_pool:
        return _not_drained(f"somebody else has made it {now.state}: {reason}")
    why_not = shared_state.reserve_drain(
        site.breaker,
        _entry(now, cause, now_s),
        members=_members(nodes, now.partitions) or {"the cluster": list(nodes)},
        ours=_drained_by_us(nodes),
    )
    if why_not:
        return _not_drained(why_not)
    result = _perform(site, now, cause, controller, now_s)
    if result.status is DrainStatus.NOT_DRAINED:
        shared_state.cancel_drain(site.breaker, node, now_s)
    return result


def _entry(now: Node, cause: Cause, now_s: float) -> Entry:
    return Entry(
        node=now.name,
        time_s=now_s,
        partitions=now.partitions,
        job=cause.job,
        uid=cause.uid,
        checks=cause.checks,
        text=cause.text[:_LEDGER_TEXT],
        hook=cause.hook,
    )


def _perform(site: Site, now: Node, cause: Cause, controller: Client, now_s: float) -> DrainResult:
    if now.reason and not drain_note.is_ours(now.reason):
        text = f"it has a note already: {now.reason}"
        return DrainResult(status=DrainStatus.FOREIGN_NOTE, text=text)
    note = DrainNote(checks=cause.checks, job=cause.job, time_s=int(now_s), text=cause.text)
    reason = drain_note.write(note)
    kept = DrainRecord(
        node=now.name,
        reason=reason,
        retest=cause.retest,
        expected=cause.expected,
        time_s=now_s,
    )
    # Before the drain: a hook that is killed now must still know that the drain is its own.
    remembered = own_drain.remember(site.state, kept)
    try:
        controller.drain([now.name], reason)
        after = controller.node(now.name)  # Slurm's return codes prove nothing
    except SlurmError as err:
        return _not_drained(f"Slurm refused, or did not answer: {err}")
    if not after.out_of_pool:
        return _not_drained("Slurm accepted the request, but the node is still in the pool")
    lost = "" if remembered else f" (no record in {site.state}: it will not be released by itself)"
    return DrainResult(status=DrainStatus.DRAINED, text=reason + lost)


def _members(nodes: Mapping[str, Node], partitions: Collection[str]) -> dict[str, list[str]]:
    return {
        partition: [each.name for each in nodes.values() if partition in each.partitions]
        for partition in partitions
    }


def _drained_by_us(nodes: Mapping[str, Node]) -> list[str]:
    return [
        each.name for each in nodes.values() if each.out_of_pool and drain_note.is_ours(each.reason)
    ]


def _not_drained(why: str) -> DrainResult:
    return DrainResult(status=DrainStatus.NOT_DRAINED, text=why)
