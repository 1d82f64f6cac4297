# SPDX-License-Identifier: Apache-2.0
"""`slurm-health nodes`: what we have drained, why, and how to give it back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from slurm_health.core.node import accusations, drain_note
from slurm_health.core.node.breaker import Ledger
from slurm_health.draining import shared_state
from slurm_health.draining.own_drain import undrain
from slurm_health.draining.shared_state import Unusable
from slurm_health.site_settings import Site
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Node


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """One node with a note of ours. `checks` is empty for a note no hook wrote."""

    node: str
    state: str
    since: str
    by: str
    checks: tuple[str, ...]
    job: int
    text: str
    hook: str = ""


def drained(nodes: Mapping[str, Node], known: Ledger) -> list[Drained]:
    """Return the nodes that are out of the pool with a note of ours, by name."""
    found = [
        _drained(node, known)
        for node in nodes.values()
        if node.out_of_pool and drain_note.is_ours(node.reason)
    ]
    return sorted(found, key=lambda each: each.node)


def _drained(node: Node, known: Ledger) -> Drained:
    note = drain_note.parse(node.reason)
    when = (node.name, note.time_s if note else None)
    entries = (each for each in reversed(known.entries) if (each.node, int(each.time_s)) == when)
    entry = next(entries, None)
    _, by, since = drain_note.signed(node.reason)
    text = note.text if note else drain_note.bare_text(node.reason)
    return Drained(
        node=node.name,
        state=node.state,
        since=since,
        by=by,
        checks=note.checks if note else (),
        job=note.job if note else 0,
        # The ledger has the whole text, the note what Slurm's tools show of it.
        text=(entry.text if entry else "") or text,
        hook=entry.hook if entry else "",
    )


def ledger_and_alarms(site: Site | None) -> tuple[Ledger, list[str]]:
    """Return the ledger, and why no node is drained at present, a line each."""
    if site is None or not site.breaker.directory:
        return Ledger(), []
    try:
        known = shared_state.read_ledger(site.breaker)
    except Unusable as err:
        return Ledger(), [f"NO NODE IS DRAINED: the breaker's ledger cannot be used: {err}"]
    return known, [
        f"THE BREAKER OF {partition} HAS TRIPPED, no node of it is drained: {trip.why};"
        " once the cause is found: slurm-health nodes reset"
        for partition, trip in known.trips.items()
    ]


def table(found: Sequence[Drained], alarms: Sequence[str]) -> str:
    """Return the list for a person, with what to type next."""
    from tabulate import tabulate

    lines = [f"{each}\n" for each in alarms]
    if not found:
        return "\n".join([*lines, "no node is drained by slurm-health\n"])
    rows = [
        (each.node, each.state, each.since, ",".join(each.checks), each.job or "", each.text)
        for each in found
    ]
    headers = ("NODE", "STATE", "SINCE", "CHECKS", "JOB", "WHY")
    lines.append(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))
    lines.append("\nto return a node to service: slurm-health nodes release NODE")
    lines.append("to repeat its checks, on the node: slurm-health nodes retest")
    return "\n".join(lines) + "\n"


def release(site: Site, names: Sequence[str], controller: Client) -> dict[str, str]:
    """Give nodes back; return what came of each. Another's drain is never lifted.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    nodes = controller.nodes()
    return {name: _release_one(site, nodes.get(name), name, controller) for name in names}


def _release_one(site: Site, now: Node | None, name: str, controller: Client) -> str:
    if now is None:
        return "unknown to Slurm"
    if not now.drained:
        return f"not drained: {now.state}"
    if not drain_note.is_ours(now.reason):
        return f"not ours: {now.reason or '(no reason)'}"
    why_not = undrain(controller, now)
    if why_not:
        return f"not released: {why_not}"
    try:
        shared_state.forget_marks(site.breaker, name)
    except Unusable as err:
        return f"released; its marks are kept: {err}"
    return "released"


def marks_text(site: Site, names: Sequence[str], now_s: float) -> str:
    """Return every mark that is alive, a line each.

    Raises:
        Unusable: the shared directory cannot be used.
    """
    lines = []
    for node in names or shared_state.marked_nodes(site.breaker):
        for each in accusations.alive(shared_state.marks_of(site.breaker, node), now_s, site.marks):
            hours = (now_s - each.time_s) / 3600
            lines.append(
                f"{node}: {hours:.0f} h ago, job {each.job} of user {each.uid}: {each.text}"
            )
    needed = f"a node is drained once {site.marks.jobs} jobs of {site.marks.users} users accuse it"
    return "\n".join([*lines, needed if lines else "no marks"]) + "\n"


def reset(site: Site) -> str:
    """Let the breaker allow drains again; what happened before does not count any more.

    Raises:
        Unusable: the ledger cannot be changed.
    """
    try:
        shared_state.clear_ledger(site.breaker)
    except Unusable as err:
        if os.getuid() == 0:
            raise
        raise Unusable(f"only root may reset the breaker, on a node: {err}") from err
    return "the breaker is reset\n"
