# SPDX-License-Identifier: Apache-2.0
"""Drain this node, and only this node: ask who holds it, ask the breaker, drain, look again."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec

from slurm_health.core.node import drain_note
from slurm_health.core.node.breaker import Entry
from slurm_health.core.node.drain_note import DrainNote
from slurm_health.core.node.finding import CheckResult
from slurm_health.core.node.recovery import DrainRecord
from slurm_health.draining import own_drain, shared_state
from slurm_health.errors import SlurmError
from slurm_health.site_settings import Site
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Node


class Came(Enum):
    """What became of the wish to drain."""

    DRAINED = "drained"
    ALREADY_OUT = "already_out"  # somebody, or we, drained it before; their note stands
    FOREIGN_NOTE = "foreign_note"  # in the pool with somebody's note on it, which stays
    NOT_DRAINED = "not_drained"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it, in words for the log."""

    came: Came
    text: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why, after which job, and which checks have to pass before the node may come back.

    `retest` is empty when no check of this node can tell: then only a person brings it back.
    """

    checks: tuple[str, ...]
    text: str
    retest: tuple[str, ...]
    job: int = 0
    uid: int = -1
    hook: str = ""


def cause_of(faults: Sequence[CheckResult], environ: Mapping[str, str], hook: str) -> Cause:
    """Return the cause that failed checks are."""
    names = tuple(each.name for each in faults)
    return Cause(
        checks=names,
        text="; ".join(each.finding.text for each in faults),
        retest=names,
        job=number(environ.get("SLURM_JOB_ID"), 0),
        uid=number(environ.get("SLURM_JOB_UID"), -1),
        hook=hook,
    )


def number(text: str | None, default: int) -> int:
    """Return a number Slurm put into the environment."""
    return int(text) if text and text.isdecimal() else default


def drain_this_node(
    site: Site, node: str, cause: Cause, *, controller: Client, now_s: float
) -> Outcome:
    """Drain this node when everybody agrees, and say what became of it."""
    if not site.hooks.drain:
        return _not("hooks.drain is false")
    if not site.breaker.directory:
        return _not("breaker.directory is not set, so nobody knows how many others are drained")
    try:
        nodes = controller.nodes()
    except SlurmError as err:
        return _not(f"Slurm cannot be asked: {err}")
    now = nodes.get(node)
    if now is None:
        return _not(f"Slurm does not know a node {node}")
    if now.drained:
        return Outcome(came=Came.ALREADY_OUT, text=f"{now.state}: {now.reason or '(no reason)'}")
    if now.out_of_pool:
        return _not(f"it is {now.state} by another's doing: {now.reason or '(no reason)'}")
    entry = Entry(
        node=node,
        time_s=now_s,
        partitions=now.partitions,
        job=cause.job,
        uid=cause.uid,
        checks=cause.checks,
        text=cause.text[:500],
        hook=cause.hook,
    )
    why_not = shared_state.try_reserve(
        site.breaker,
        entry,
        members=_members(nodes, now.partitions) or {"the cluster": list(nodes)},
        ours=_drained_by_us(nodes),
        owner=os.getuid(),
    )
    if why_not:
        return _not(why_not)
    outcome = _perform(site, now, cause, controller, now_s)
    if outcome.came is Came.NOT_DRAINED:
        shared_state.forget(site.breaker, node, now_s, owner=os.getuid())
    return outcome


def _perform(site: Site, now: Node, cause: Cause, controller: Client, now_s: float) -> Outcome:
    if now.reason and not drain_note.is_ours(now.reason):
        return Outcome(came=Came.FOREIGN_NOTE, text=f"it has a note already: {now.reason}")
    note = DrainNote(checks=cause.checks, job=cause.job, time_s=int(now_s), text=cause.text)
    reason = drain_note.write(note)
    kept = DrainRecord(node=now.name, reason=reason, retest=cause.retest, time_s=now_s)
    # Before the drain: a hook that is killed now must still know that the drain is its own.
    was_kept = own_drain.keep(site.state, kept)
    try:
        controller.drain([now.name], reason)
        after = controller.node(now.name)  # Slurm's return codes prove nothing
    except SlurmError as err:
        return _not(f"Slurm refused, or did not say: {err}")
    if not after.out_of_pool:
        return _not("Slurm took the request, and the node is still in the pool")
    lost = "" if was_kept else f" (no record in {site.state}: it will not be released by itself)"
    return Outcome(came=Came.DRAINED, text=reason + lost)


def _members(nodes: Mapping[str, Node], partitions: Collection[str]) -> dict[str, list[str]]:
    return {
        partition: [each.name for each in nodes.values() if partition in each.partitions]
        for partition in partitions
    }


def _drained_by_us(nodes: Mapping[str, Node]) -> list[str]:
    return [
        each.name for each in nodes.values() if each.out_of_pool and drain_note.is_ours(each.reason)
    ]


def _not(why: str) -> Outcome:
    return Outcome(came=Came.NOT_DRAINED, text=why)


def shared_directory(site: Site) -> Path | None:
    """Return the directory all nodes share, None where the site has none."""
    return Path(site.breaker.directory) if site.breaker.directory else None
