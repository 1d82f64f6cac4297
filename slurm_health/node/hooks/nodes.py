# SPDX-License-Identifier: Apache-2.0
"""`slurm-health nodes`: what we have drained, why, and how to give it back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurm_health.node import drain, marks, shared, state
from slurm_health.node.checks.check import CheckContext, first_few
from slurm_health.node.hooks import healthcheck
from slurm_health.node.hooks.healthcheck import LastCheck
from slurm_health.node.rules import accusations, drain_note, repair
from slurm_health.node.rules.breaker import DrainEntry, DrainLedger, Ignored, Trip
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.rules.repair import Outcome, RepairAttempt
from slurm_health.node.run import after_drain, run_again
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node

RELEASED = "released"
# What the note of a node says that was drained for its marks.
MARKED = "marks"
_LATE_S = 3600.0
# Of a partition whose breaker has tripped, all nodes may be faulty, and each in its own way.
_MOST_LEFT = 10


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """One node with a note of ours. `checks` is empty for a note no hook wrote.

    If the note is `edited`, the drain is another's: nothing of ours lifts it. `time_s` is when it
    was drained, 0 if the note does not say.
    """

    node: str
    state: str
    since: str
    by: str
    checks: tuple[str, ...]
    job: int
    text: str
    hook: str = ""
    last_check: LastCheck | None = None
    edited: bool = False
    time_s: int = 0

    def now(self, needed: int) -> str:
        """Return what its last health check says, and what it waits for."""
        check = self.last_check
        if self.edited:
            return "note edited: only scontrol lifts it"
        if check is None:
            return "no health check"
        if check.faulty:
            same = check.faults.partition(": ")[2] == self.text
            return "still faulty" if same else f"faulty: {check.faults}"
        if check.needs:
            return check.needs
        return f"{check.passes} of {needed} passes"


def drained(
    nodes: Mapping[str, Node], known: DrainLedger, checked: Mapping[str, LastCheck]
) -> list[Drained]:
    """Return the nodes that are out of the pool with a note of ours, by name."""
    found = [
        _drained(node, known, checked.get(node.name))
        for node in nodes.values()
        if node.out_of_pool and drain_note.is_ours(node.reason)
    ]
    return sorted(found, key=lambda each: each.node)


def _drained(node: Node, known: DrainLedger, last_check: LastCheck | None) -> Drained:
    note = drain_note.parse(node.reason)
    entry = _entry_of(node, known)
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
        edited=_is_edited(node, entry),
        time_s=note.time_s if note else 0,
    )


def _entry_of(node: Node, known: DrainLedger) -> DrainEntry | None:
    """Return the entry of the drain that a node's note tells of, None where there is none."""
    note = drain_note.parse(node.reason)
    when = (node.name, note.time_s if note else None)
    entries = (each for each in reversed(known.entries) if (each.node, int(each.time_s)) == when)
    return next(entries, None)


def _is_edited(node: Node, entry: DrainEntry | None) -> bool:
    return drain_note.is_edited(node.reason, entry.note if entry else "")


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What `nodes` has to say, for a person and for a program.

    Args:
        drained: the nodes that are drained with a note of ours.
        tripped: the partitions and leaf switches whose breaker has tripped; None where only root
            may see that.
        ledger_trouble: why the breaker's ledger cannot be used; empty where it can.
        left_in_pool: the last health checks of faulty nodes that jobs can still start on.
        silent: the nodes that have run no health check for an hour, or none that is known of, but
            for those that a step to repair them keeps from it.
        never_checked: those of them of which no health check is known.
        repairs: the steps of the last day, the oldest first of each node.
        passes: how many a drained node needs to return to service.
        marked: the nodes that users' jobs accuse, with what the last one says; None if only root
            may see that.
        ignored: the nodes that are left in service for a while.
        troubles: what is wrong with config files, and the nodes that use their last good settings.
    """

    drained: list[Drained]
    tripped: dict[str, Trip] | None
    ledger_trouble: str
    left_in_pool: list[LastCheck]
    silent: list[str]
    never_checked: list[str] = []
    repairs: list[RepairAttempt] = []
    passes: int = 0
    marked: dict[str, str] | None = {}
    troubles: dict[str, list[str]] = {}
    ignored: dict[str, Ignored] = {}

    @property
    def needs_a_person(self) -> bool:
        """Whether faulty nodes are not drained, or would not be."""
        return bool(self.tripped or self.ledger_trouble or self.left_in_pool or self.troubles)


def listing(site: Site | None, nodes: Mapping[str, Node], now_s: float) -> Listing:
    """Look at what there is to say. What nodes left that Slurm has no more is removed."""
    checked = healthcheck.read_last_checks(site) if site is not None else {}
    if site is not None:
        healthcheck.forget_last_checks(site, nodes)
    known, trouble = _ledger(site)
    latest = repair.of_last_day(known.repairs if known else (), now_s)
    repairs = [attempt for name in sorted(latest) for attempt in latest[name]]
    return Listing(
        drained=drained(nodes, known or DrainLedger(), checked),
        tripped=known.trips if known is not None else None,
        ledger_trouble=trouble,
        left_in_pool=[
            checked[name]
            for name in sorted(nodes)
            if name in checked and checked[name].faulty and not nodes[name].out_of_pool
        ],
        silent=(silent := _silent(nodes, checked, site, repairs, now_s)),
        never_checked=[name for name in silent if name not in checked],
        repairs=repairs,
        passes=site.recovery.passes if site else 0,
        marked=_marked(site, now_s),
        ignored={
            name: ignored
            for name, ignored in (known.ignored if known else {}).items()
            if ignored.until_s > now_s
        },
        troubles=_troubles(nodes, checked),
    )


def _ledger(site: Site | None) -> tuple[DrainLedger | None, str]:
    """Return the ledger, None where only root may see it; and why it cannot be used."""
    if site is None or not site.breaker.directory:
        return DrainLedger(), ""
    try:
        return shared.read_ledger(site.breaker), ""
    except shared.StoreForRoot:
        return None, ""
    except StoreUnusable as err:
        return DrainLedger(), str(err)


def _marked(site: Site | None, now_s: float) -> dict[str, str] | None:
    """Return what is said against nodes by marks that have not expired."""
    if site is None or not site.breaker.directory:
        return {}
    found = {}
    try:
        for node in marks.marked_nodes(site.breaker):
            alive = accusations.alive(marks.of_node(site.breaker, node), now_s)
            if alive:
                ago = _ago(now_s - alive[-1].time_s)
                found[node] = f"{accusations.summary(alive)} ({ago})"
    except shared.StoreForRoot:
        return None
    except StoreUnusable:
        return {}  # which the ledger says
    return found


def _troubles(nodes: Mapping[str, Node], checked: Mapping[str, LastCheck]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(nodes):
        if name in checked and checked[name].trouble:
            found.setdefault(checked[name].trouble, []).append(name)
    return found


def _alarms(found: Listing) -> list[str]:
    """Return why no node is drained at present, a line each."""
    if found.tripped is None:
        return ["only root can see whether the breaker has tripped"]
    if found.ledger_trouble:
        return [f"NO NODE IS DRAINED: the breaker's ledger cannot be used: {found.ledger_trouble}"]
    return [
        f"THE BREAKER OF {partition} HAS TRIPPED, no node of it is drained: {trip.why};"
        " once the cause is found: slurm-health nodes reset"
        for partition, trip in found.tripped.items()
    ]


def text(found: Listing, now_s: float) -> str:
    """Return it for a person."""
    told = table(found.drained, _alarms(found), now_s, needed=found.passes)
    told += "".join(f"faulty, but still in the pool: {line}\n" for line in _left(found, now_s))
    told += "".join(
        f"last good settings in use on {fold(names)}: {trouble}\n"
        for trouble, names in found.troubles.items()
    )
    told += "".join(
        f"ignored: {node} for {_age(ignored.until_s - now_s)}, by {ignored.by}"
        f"{f': {ignored.why}' if ignored.why else ''}\n"
        for node, ignored in sorted(found.ignored.items())
    )
    told += "".join(f"marked: {node}: {said}\n" for node, said in (found.marked or {}).items())
    told += "".join(f"repair: {_step(attempt, now_s)}\n" for attempt in found.repairs)
    late = sorted({*found.silent} - {*found.never_checked})
    told += _without_check("no health check for an hour", late)
    return told + _without_check("no health check yet", found.never_checked)


def _without_check(what: str, names: Sequence[str]) -> str:
    """Return the line about nodes without a health check, nothing where there are none."""
    return f"{what}: {first_few(names)} ({counted(len(names), 'node')})\n" if names else ""


def _step(tried: RepairAttempt, now_s: float) -> str:
    """Return a step for a person: of which node, when, and how far it has come."""
    left_min = max(0.0, tried.until_s - now_s) / 60
    how = {
        Outcome.BEGUN: f"under way, {left_min:.0f} min left",
        Outcome.DONE: "done",
        Outcome.FAILED: "failed",
        Outcome.DRY_RUN: "would be taken (dry run)",
    }[tried.outcome]
    text = f": {tried.text}" if tried.text else ""
    return f"{tried.node}: {tried.step.value}, {_ago(now_s - tried.time_s)}: {how}{text}"


def _left(found: Listing, now_s: float) -> list[str]:
    """Return which nodes jobs can start on although they are faulty, a line for each fault."""
    of_fault: dict[str, list[LastCheck]] = {}
    for each in found.left_in_pool:
        of_fault.setdefault(each.faults or each.text, []).append(each)
    lines = []
    for fault, checks in of_fault.items():
        oldest = min(checks, key=lambda check: check.time_s)
        lines.append(f"{fold(check.node for check in checks)}, {oldest.age(now_s)}: {fault}")
    more = sum(len(checks) for checks in list(of_fault.values())[_MOST_LEFT:])
    return [*lines[:_MOST_LEFT], *([f"and on {more} more"] if more else [])]


def table(found: Sequence[Drained], alarms: Sequence[str], now_s: float, *, needed: int) -> str:
    """Return the list for an administrator, with what to type next.

    `needed` is how many passes return a node to service.
    """
    from tabulate import tabulate

    lines = [f"{each}\n" for each in alarms]
    if not found:
        return "\n".join([*lines, "no node is drained by slurm-health\n"])
    rows = [
        (
            each.node,
            each.state.lower(),
            _age(now_s - each.time_s) if each.time_s else each.since,
            each.text,
            each.now(needed),
            each.job or "",
        )
        for each in found
    ]
    headers = ("NODE", "STATE", "FOR", "DRAINED FOR", "NOW", "JOB")
    lines.append(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))
    lines.append("\nto return a node to service: slurm-health nodes release NODE")
    lines.append("to repeat its checks, on the node: slurm-health nodes retest")
    return "\n".join(lines) + "\n"


def _silent(
    nodes: Iterable[str],
    checked: Mapping[str, LastCheck],
    site: Site | None,
    repairs: Iterable[RepairAttempt],
    now_s: float,
) -> list[str]:
    """Return which nodes have run no health check of late, though nothing keeps them from it."""
    if site is None or not site.breaker.directory:
        return []
    under_way = {attempt.node for attempt in repairs if attempt.is_under_way(now_s)}
    # One from the future is by a clock that is wrong, and would never be late.
    late = {each.node for each in checked.values() if abs(now_s - each.time_s) > _LATE_S}
    silent = (name for name in sorted(nodes) if name not in checked or name in late)
    return [name for name in silent if name not in under_way]


def checked_text(checked: Mapping[str, LastCheck], names: Sequence[str], now_s: float) -> str:
    """Return the last health check of each node, a line each."""
    lines = [
        f"{name}: {checked[name].said(now_s) if name in checked else 'none'}"
        for name in names or sorted(checked)
    ]
    return "\n".join(lines or ["no health check has been recorded"]) + "\n"


def repeat(site: Site, kept: DrainRecord, place: CheckContext) -> list[CheckResult]:
    """Run again, on this node, the checks that it was drained for."""
    planned = [check for check in site.planned if check.name in kept.retest]
    return run_again(planned, after_drain(place, kept))


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
    kept = state.recall(site.state, here) if here in names else None
    if kept is not None:
        now = healthcheck.last_check_of(repeat(site, kept, place), node=here, now_s=place.now_s)
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
    nodes, (known, _) = controller.nodes(), _ledger(site)
    known = known or DrainLedger()
    came = {name: _release_one(site, nodes.get(name), name, controller, known) for name in names}
    return {
        name: f"{text}; drained again if what its last check found is so still: {doubts[name]}"
        if name in doubts and text.startswith(RELEASED)
        else text
        for name, text in came.items()
    }


def _release_one(
    site: Site, now: Node | None, name: str, controller: Client, known: DrainLedger
) -> str:
    if now is None:
        return "unknown to Slurm"
    if not now.drained:
        return f"not drained: {now.state}"
    if not drain_note.is_ours(now.reason):
        return f"not ours: {now.reason or '(no reason)'}"
    if _is_edited(now, _entry_of(now, known)):
        resume = f"scontrol update NodeName={name} State=RESUME"
        return f"not released: its note was edited since, so the drain is another's: {resume}"
    why_kept = _why_marks_stay(site, name)
    note = drain_note.parse(now.reason)
    if why_kept and note is not None and note.checks == (MARKED,):
        return f"not released: the next mark would drain it again, and its marks stay: {why_kept}"
    why_not = drain.undrain(controller, now)
    if why_not:
        return f"not released: {why_not}"
    drain.count_return(site, name)
    if not why_kept:
        try:
            marks.delete(site.breaker, name)
        except StoreUnusable as err:
            why_kept = str(err)
    return f"{RELEASED}; its marks are kept: {why_kept}" if why_kept else RELEASED


def _why_marks_stay(site: Site, name: str) -> str:
    """Return why a node's marks could not be removed, looked at before anything is done."""
    try:
        return marks.why_they_stay(site.breaker, name)
    except StoreUnusable as err:
        return str(err)


def marks_text(site: Site, names: Sequence[str], now_s: float) -> str:
    """Return every mark that is alive, a line each.

    Raises:
        StoreUnusable: the shared directory cannot be used.
    """
    lines = [
        f"{node}: {_ago(now_s - each.time_s)}, job {each.job} of user"
        f" {shared.user_name(each.uid)}: {each.text}"
        for node in names or marks.marked_nodes(site.breaker)
        for each in accusations.alive(marks.of_node(site.breaker, node), now_s)
    ]
    limits = site.accusations
    needed = f"a node is drained once {limits.jobs} jobs of {limits.users} users accuse it"
    return "\n".join([*lines, needed if lines else "no marks"]) + "\n"


def _ago(age_s: float) -> str:
    return f"{_age(age_s)} ago"


def _age(age_s: float) -> str:
    if age_s >= 2 * 86400:
        return f"{age_s / 86400:.0f} d"
    return f"{age_s / 3600:.0f} h" if age_s >= 3600 else f"{max(0.0, age_s) / 60:.0f} min"


def ignore(site: Site, names: Sequence[str], until_s: float, *, by: str, why: str) -> None:
    """Have nodes left in service until then, whatever their checks say.

    Raises:
        StoreUnusable: the ledger cannot be changed.
    """

    def change(ledger: DrainLedger) -> tuple[DrainLedger, None]:
        new = Ignored(until_s=until_s, by=by, why=why)
        ignored = {**ledger.ignored, **dict.fromkeys(names, new)}
        return msgspec.structs.replace(ledger, ignored=ignored), None

    shared.change_ledger(site, change, type(None))


def reset(site: Site) -> str:
    """Let the breaker allow drains again; what happened before does not count any more.

    Raises:
        StoreUnusable: the ledger cannot be changed.
    """
    try:
        shared.clear_ledger(site)
    except StoreUnusable as err:
        if os.getuid() == 0:
            raise
        where = f"sudo slurm-health nodes reset, on a node with {site.breaker.directory}"
        raise StoreUnusable(f"only root may reset the breaker: {where}") from err
    return "the breaker is reset\n"
