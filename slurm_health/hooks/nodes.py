# SPDX-License-Identifier: Apache-2.0
"""`slurm-health nodes`: what we have drained, why, and how to give it back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurm_health.checks.check import CheckContext, first_few
from slurm_health.core.node import accusations, drain_note
from slurm_health.core.node.breaker import Ledger
from slurm_health.core.node.finding import CheckResult
from slurm_health.core.node.recovery import DrainRecord
from slurm_health.draining import own_drain, shared_state
from slurm_health.draining.own_drain import undrain
from slurm_health.draining.shared_state import Unusable
from slurm_health.hooks import last_check
from slurm_health.hooks.last_check import LastCheck
from slurm_health.hooks.run_checks import run_again
from slurm_health.site_settings import Site
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Node

RELEASED = "released"
_LATE_S = 3600.0


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
    last_check: LastCheck | None = None


def drained(
    nodes: Mapping[str, Node], known: Ledger, checked: Mapping[str, LastCheck]
) -> list[Drained]:
    """Return the nodes that are out of the pool with a note of ours, by name."""
    found = [
        _drained(node, known, checked.get(node.name))
        for node in nodes.values()
        if node.out_of_pool and drain_note.is_ours(node.reason)
    ]
    return sorted(found, key=lambda each: each.node)


def _drained(node: Node, known: Ledger, last_check: LastCheck | None) -> Drained:
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
        last_check=last_check,
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


def table(found: Sequence[Drained], alarms: Sequence[str], now_s: float) -> str:
    """Return the list for a person, with what to type next."""
    from tabulate import tabulate

    lines = [f"{each}\n" for each in alarms]
    if not found:
        return "\n".join([*lines, "no node is drained by slurm-health\n"])
    rows = [
        (
            each.node,
            each.state,
            each.since,
            each.last_check.age(now_s) if each.last_check else "",
            ",".join(each.checks),
            each.job or "",
            each.text,
        )
        for each in found
    ]
    headers = ("NODE", "STATE", "SINCE", "CHECKED", "CHECKS", "JOB", "WHY")
    lines.append(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))
    lines.append("\nto return a node to service: slurm-health nodes release NODE")
    lines.append("to repeat its checks, on the node: slurm-health nodes retest")
    return "\n".join(lines) + "\n"


def silent_text(
    nodes: Iterable[str], checked: Mapping[str, LastCheck], site: Site | None, now_s: float
) -> str:
    """Return which nodes have run no health check of late, empty for none."""
    if site is None or not site.breaker.directory:
        return ""
    late = {each.node for each in checked.values() if now_s - each.time_s > _LATE_S}
    silent = [name for name in sorted(nodes) if name not in checked or name in late]
    if not silent:
        return ""
    return f"no health check for an hour: {first_few(silent)} ({len(silent)} nodes)\n"


def checked_text(checked: Mapping[str, LastCheck], names: Sequence[str], now_s: float) -> str:
    """Return the last health check of each node, a line each."""
    lines = [f"{each.node}: {each.said(now_s)}" for _, each in sorted(checked.items())]
    if names:
        lines = [
            f"{name}: {checked[name].said(now_s) if name in checked else 'none'}" for name in names
        ]
    return "\n".join(lines or ["no node has left a health check"]) + "\n"


def repeat(site: Site, kept: DrainRecord, place: CheckContext) -> list[CheckResult]:
    """Run again, on this node, the checks that it was drained for."""
    planned = [each for each in site.checks if each.name in kept.retest]
    environ = {**place.environ, **kept.expected}
    return run_again(planned, msgspec.structs.replace(place, environ=environ))


def doubts(
    site: Site,
    names: Sequence[str],
    checked: Mapping[str, LastCheck],
    here: str,
    place: CheckContext,
) -> dict[str, str]:
    """Return what speaks against giving nodes back.

    On the node itself, what it was drained for is tested now; of others, their last health check
    tells.
    """
    found = {
        name: checked[name].said(place.now_s)
        for name in names
        if name in checked and checked[name].faulty
    }
    kept = own_drain.recall(site.state) if here in names else None
    if kept is not None:
        now = last_check.of_results(repeat(site, kept, place), node=here, now_s=place.now_s)
        found.pop(here, None)
        if now.faulty:
            found[here] = now.said(place.now_s)
    return found


def release(
    site: Site, names: Sequence[str], controller: Client, doubts: Mapping[str, str]
) -> dict[str, str]:
    """Give nodes back; return what came of each. Another's drain is never lifted.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    nodes = controller.nodes()
    came = {name: _release_one(site, nodes.get(name), name, controller) for name in names}
    return {
        name: f"{text}; it will be drained again: {doubts[name]}"
        if name in doubts and text.startswith(RELEASED)
        else text
        for name, text in came.items()
    }


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
        return f"{RELEASED}; its marks are kept: {err}"
    return RELEASED


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
        shared_state.clear_ledger(site)
    except Unusable as err:
        if os.getuid() == 0:
            raise
        raise Unusable(f"only root may reset the breaker, on a node: {err}") from err
    return "the breaker is reset\n"
