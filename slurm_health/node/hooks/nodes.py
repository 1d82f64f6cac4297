# SPDX-License-Identifier: Apache-2.0
"""`slurm-health nodes`: the nodes that we drained, why, and how to return them to service."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from slurm_health.node import drain, shared, slurm_drains
from slurm_health.node.checks.check import first_few
from slurm_health.node.hooks import healthcheck
from slurm_health.node.hooks.healthcheck import LastCheck
from slurm_health.node.marks import MARKS
from slurm_health.node.rules import accusations, drain_note, repair
from slurm_health.node.rules.breaker import DrainEntry, DrainLedger, Ignored, Trip
from slurm_health.node.rules.repair import Outcome, RepairAttempt
from slurm_health.node.rules.slurm_drain import culprit_text, culprits
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import CompletingJob, Node

RELEASED = "released"
# In the note of a node that was drained for its marks.
MARKED = "marks"
_LATE_S, _DAY_S = 3600.0, 86_400.0
# Of a partition whose breaker has tripped, all nodes may be faulty, and each in its own way.
_MOST_LEFT = 10
_STEPS = {
    Outcome.DONE: "done",
    Outcome.FAILED: "failed",
    Outcome.DRY_RUN: "would be taken (dry run)",
}


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """One node that is out of the pool with a note of ours.

    Args:
        node: its name.
        state: in Slurm.
        since: when the note was set, as Slurm shows it.
        checks: that failed; empty for a note no hook wrote.
        job: after which job; 0 for none.
        text: why it was drained.
        now: what holds it there now.
        edited: the note was edited: the drain is its editor's, and nothing of ours lifts it.
        time_s: when it was drained, 0 if the note does not say.
    """

    node: str
    state: str
    since: str
    checks: tuple[str, ...]
    job: int
    text: str
    now: str
    edited: bool = False
    time_s: int = 0


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `nodes`, for administrators and for programs.

    Args:
        drained: the nodes that are drained with a note of ours.
        tripped: the partitions and leaf switches whose breaker has tripped; None if only root may
            see that.
        ledger_trouble: why the breaker's ledger cannot be used; empty if it can.
        left_in_pool: the last health checks of faulty nodes that jobs can still start on.
        silent: the nodes without a health check for an hour, or without any; not those that a
            repair step keeps from it.
        repairs: the steps of the last day by node, the oldest first.
        marked: the nodes that users' jobs accuse, with the summary of their marks, for root.
        overdue: nodes with a step of a repair that has not ended in time, such as a reboot.
        ignored: the nodes that are left in service for a while.
        troubles: problems of config files, with the nodes that use their last good settings.
        by_slurm: nodes that Slurm drained or downed by itself, or that a job does not leave.
        culprits: jobs, arrays and users that cost several nodes, with advice for their owner.
        returned: nodes whose drain of Slurm's was lifted within a day, with its cause.
        unwatched: by node, its jobs that run on though their watch has ended.
        progress: of the jobs that run and are watched, a few minutes old.
    """

    drained: list[Drained]
    tripped: dict[str, Trip] | None
    ledger_trouble: str
    left_in_pool: list[LastCheck]
    silent: list[str]
    repairs: list[RepairAttempt]
    marked: dict[str, str]
    overdue: list[str]
    ignored: dict[str, Ignored]
    troubles: dict[str, list[str]]
    by_slurm: list[slurm_drains.Group] = []
    culprits: list[str] = []
    returned: dict[str, str] = {}
    unwatched: dict[str, str] = {}
    progress: dict[str, str] = {}

    @property
    def needs_administrator(self) -> bool:
        """Whether faulty nodes are in service, or nodes out of it do not return by themselves."""
        waits = any(group.needs_administrator for group in self.by_slurm)
        return waits or bool(
            self.tripped
            or self.ledger_trouble
            or self.left_in_pool
            or self.troubles
            or self.overdue
        )


def listing(
    site: Site | None,
    nodes: Mapping[str, Node],
    now_s: float,
    completing: Sequence[CompletingJob] = (),
) -> Listing:
    """Return the listing. Health checks of nodes that Slurm no longer has are deleted."""
    site = site or Site()
    records = slurm_drains.RECORDS.load(site.breaker)
    by_slurm = slurm_drains.drains_of(nodes, completing, records, now_s)
    after = culprits((*records.values(), *by_slurm), now_s, shared.user_name)
    known, trouble = _ledger(site)
    ledger = known or DrainLedger()
    checked = healthcheck.LAST_CHECKS.load(site.breaker)
    healthcheck.LAST_CHECKS.delete_others(site.breaker, nodes)
    latest = repair.of_last_day(ledger.repairs, now_s)
    repairs = [attempt for name in sorted(latest) for attempt in latest[name]]
    under_way = {attempt.node for attempt in repairs if attempt.is_under_way(now_s)}
    # A check from the future is by a clock that is wrong, and would never be late.
    silent = [
        name
        for name in sorted(nodes if site.breaker.directory else ())
        if name not in under_way
        and (name not in checked or abs(now_s - checked[name].time_s) > _LATE_S)
    ]
    troubles: dict[str, list[str]] = {}
    left = []
    for name in sorted(checked.keys() & nodes.keys()):
        if checked[name].trouble:
            troubles.setdefault(checked[name].trouble, []).append(name)
        if checked[name].faulty and not nodes[name].out_of_pool:
            left.append(checked[name])
    recent = [c for n, c in sorted(checked.items()) if n in nodes and now_s - c.time_s < _LATE_S]
    return Listing(
        drained=drained(nodes, ledger, checked, site.recovery.passes),
        tripped=known.trips if known is not None else None,
        ledger_trouble=trouble,
        left_in_pool=left,
        silent=silent,
        repairs=repairs,
        marked=_marked(site, now_s),
        overdue=[
            attempt.node
            for attempt in repairs
            if attempt.outcome is Outcome.BEGUN
            and now_s >= attempt.until_s
            and (attempt.node not in checked or checked[attempt.node].time_s < attempt.until_s)
        ],
        ignored={n: ignored for n, ignored in ledger.ignored.items() if ignored.until_s > now_s},
        troubles=troubles,
        by_slurm=slurm_drains.groups_of(site, by_slurm, records, now_s),
        culprits=[culprit_text(name, drains) for name, drains in after.items()],
        returned={
            name: f"{_age(now_s - record.over_s)} ago:"
            f" {slurm_drains.sentence(site, record, record.over_s)}"
            for name, record in sorted(records.items())
            if record.lifted and now_s - record.over_s < _DAY_S
        },
        unwatched={check.node: check.unwatched for check in recent if check.unwatched},
        progress={job: text for check in recent for job, text in check.progress.items()},
    )


def drained(
    nodes: Mapping[str, Node],
    known: DrainLedger,
    checked: Mapping[str, LastCheck],
    passes: int,
) -> list[Drained]:
    """Return the nodes that are out of the pool with a note of ours, sorted by name.

    `passes` is the number that returns a node to service.
    """
    rows = []
    for node in sorted(nodes.values(), key=lambda node: node.name):
        if not (node.out_of_pool and drain_note.is_ours(node.reason)):
            continue
        note, entry, check = drain_note.parse(node.reason), _entry_of(node, known), None
        _, _, since = drain_note.signed(node.reason)
        # The ledger has the whole text, the note what Slurm's tools show of it.
        text = (entry.text if entry else "") or (
            note.text if note else drain_note.bare_text(node.reason)
        )
        edited, check = _is_edited(node, entry), checked.get(node.name)
        if edited:
            now = "note edited: only scontrol lifts it"
        elif "INVAL" in node.state:
            now = "INVAL: Slurm refuses what the node registers; only that can be repaired now"
        elif check is None:
            now = "no health check"
        elif check.faulty:
            same = check.faults.partition(": ")[2] == text
            now = "still faulty" if same else f"faulty: {check.faults}"
        elif not check.recorded and entry is not None and entry.hook != "check":
            now = "its record is lost: release it by hand, and keep hooks.state on a disk"
        else:
            now = check.needs or f"{check.passes} of {passes} passes"
        rows.append(
            Drained(
                node=node.name,
                state=node.state,
                since=since,
                checks=note.checks if note else (),
                job=note.job if note else 0,
                text=text,
                now=now,
                edited=edited,
                time_s=note.time_s if note else 0,
            )
        )
    return rows


def _entry_of(node: Node, known: DrainLedger) -> DrainEntry | None:
    """Return the entry of the drain that set a node's note, None if there is none."""
    note = drain_note.parse(node.reason)
    when = (node.name, note.time_s if note else None)
    entries = (
        entry for entry in reversed(known.entries) if (entry.node, int(entry.time_s)) == when
    )
    return next(entries, None)


def _is_edited(node: Node, entry: DrainEntry | None) -> bool:
    return drain_note.is_edited(node.reason, entry.note if entry else "")


def _ledger(site: Site) -> tuple[DrainLedger | None, str]:
    """Return the ledger, None if only root may see it; and why it cannot be used."""
    if not site.breaker.directory:
        return DrainLedger(), ""
    try:
        return shared.read_ledger(site.breaker), ""
    except shared.StoreForRoot:
        return None, ""
    except StoreUnusable as err:
        return DrainLedger(), str(err)


def _marked(site: Site, now_s: float) -> dict[str, str]:
    """Return the nodes with marks that have not expired, with the summary and who left them."""
    marked: dict[str, str] = {}
    for node, own in sorted(MARKS.load(site.breaker).items()):
        if alive := accusations.alive(own, now_s):
            users = {mark.uid: shared.user_name(mark.uid) for mark in alive}
            who = ", ".join(
                f"job {mark.job} of {users[mark.uid]} {_age(now_s - mark.time_s)} ago"
                for mark in alive
            )
            marked[node] = f"{accusations.summary(alive)} ({who})"
    return marked


def text(report: Listing, now_s: float) -> str:
    """Return the report as text, with the commands to type next."""
    from tabulate import tabulate

    lines = []
    if report.tripped is None:
        lines.append("only root can see whether the breaker has tripped\n")
    if report.ledger_trouble:
        lines.append(f"NO NODE IS DRAINED: the ledger cannot be used: {report.ledger_trouble}\n")
    for partition, trip in (report.tripped or {}).items():
        lines.append(
            f"THE BREAKER OF {partition} HAS TRIPPED, no node of it is drained: {trip.why};"
            " once the cause is found: slurm-health nodes reset\n"
        )
    if report.drained:
        rows = [
            (
                node.node,
                node.state.lower(),
                _age(now_s - node.time_s) if node.time_s else node.since,
                node.text,
                node.now,
                node.job or "",
            )
            for node in report.drained
        ]
        headers = ("NODE", "STATE", "FOR", "DRAINED FOR", "NOW", "JOB")
        lines.append(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))
        if not all("INVAL" in node.state for node in report.drained):
            lines.append("\nto return a node to service: slurm-health nodes release NODE")
        lines.append(
            "to repeat its checks, on the node: slurm-health healthcheck --context retest\n"
        )
    else:
        lines.append("no node is drained by slurm-health\n")
    lines += [f"{group.nodes}  {group.text}\n" for group in report.by_slurm]
    lines += [f"{text}\n" for text in report.culprits]
    body = "\n".join(lines)
    of_fault: dict[str, list[LastCheck]] = {}
    for check in report.left_in_pool:
        of_fault.setdefault(check.faults or check.text, []).append(check)
    more = [
        f"faulty, but still in the pool: {fold(check.node for check in checks)},"
        f" {_age(now_s - min(check.time_s for check in checks))} ago: {fault}"
        for fault, checks in of_fault.items()
    ]
    others = sum(len(checks) for checks in list(of_fault.values())[_MOST_LEFT:])
    more[_MOST_LEFT:] = [f"faulty, but still in the pool: {others} more"] if others else []
    more += [f"last good settings in use on {fold(n)}: {t}" for t, n in report.troubles.items()]
    more += [
        f"ignored: {node} for {_age(ignored.until_s - now_s)}, by {ignored.by}"
        f"{f': {ignored.why}' if ignored.why else ''}"
        for node, ignored in sorted(report.ignored.items())
    ]
    more += [f"returned: {node} {text}" for node, text in report.returned.items()]
    more += [f"marked: {node}: {summary}" for node, summary in report.marked.items()]
    more += [f"{node}: {text}" for node, text in report.unwatched.items()]
    more += [f"job {job}: {text}" for job, text in report.progress.items() if text]
    for attempt in report.repairs:
        when, left_s = f"{_age(now_s - attempt.time_s)} ago", attempt.until_s - now_s
        under_way = f"under way, {left_s / 60:.0f} min left" if left_s > 0 else "not over in time"
        how = _STEPS.get(attempt.outcome, under_way)
        why = f": {attempt.text}" if attempt.text else ""
        more.append(f"repair: {attempt.node}: {attempt.step.value}, {when}: {how}{why}")
    if report.silent:
        names = f"{first_few(report.silent)} ({counted(len(report.silent), 'node')})"
        more.append(f"no health check within the hour: {names}")
    return body + "".join(f"{line}\n" for line in more)


def _age(age_s: float) -> str:
    if age_s >= 2 * 86400:
        return f"{age_s / 86400:.0f} d"
    return f"{age_s / 3600:.0f} h" if age_s >= 3600 else f"{max(0.0, age_s) / 60:.0f} min"


# --- what an administrator does ------------------------------------------------------------------


def doubts(names: Sequence[str], checked: Mapping[str, LastCheck], now_s: float) -> dict[str, str]:
    """Return the nodes that are still faulty by their last health check, with the faults."""
    checks = [checked[name] for name in names if name in checked]
    return {c.node: f"{_age(now_s - c.time_s)} ago: {c.text}" for c in checks if c.faulty}


def release(
    site: Site, names: Sequence[str], controller: Client, doubts: Mapping[str, str]
) -> dict[str, str]:
    """Return nodes to service; return the outcome by name. Another's drain is never lifted.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    nodes, (known, _) = controller.nodes(), _ledger(site)
    outcomes = {}
    for name in names:
        text = _release_one(site, nodes.get(name), name, controller, known or DrainLedger())
        if name in doubts and text.startswith(RELEASED):
            text += f"; drained again if its last check still holds: {doubts[name]}"
        outcomes[name] = text
    return outcomes


def _release_one(
    site: Site, now: Node | None, name: str, controller: Client, known: DrainLedger
) -> str:
    if now is None:
        return "unknown to Slurm"
    if not now.drained:
        return f"not drained: {now.state}"
    if not drain_note.is_ours(now.reason):
        resume = f"; once its cause is gone: scontrol update NodeName={name} State=RESUME"
        return (
            f"not ours: {now.reason or '(no reason)'}{resume if drain.by_slurm_itself(now) else ''}"
        )
    if _is_edited(now, _entry_of(now, known)):
        resume = f"scontrol update NodeName={name} State=RESUME"
        return f"not released: its note was edited since, so the drain is another's: {resume}"
    why_kept, note = "", drain_note.parse(now.reason)
    if site.breaker.directory:
        try:
            MARKS.delete(site.breaker, name)
        except StoreUnusable as err:
            why_kept = str(err)
    if why_kept and note is not None and note.checks == (MARKED,):
        return f"not released: the next mark would drain it again, and its marks stay: {why_kept}"
    if why_not := drain.undrain(controller, now):
        return f"not released: {why_not}"
    drain.count_return(site, name)
    return f"{RELEASED}; its marks are kept: {why_kept}" if why_kept else RELEASED


def ignore(site: Site, names: Sequence[str], until_s: float, *, by: str, why: str) -> None:
    """Leave nodes in service until then, whatever their checks say.

    Raises:
        StoreUnusable: the ledger cannot be changed.
    """

    def change(ledger: DrainLedger) -> tuple[DrainLedger, None]:
        new = Ignored(until_s=until_s, by=by, why=why)
        ignored = {**ledger.ignored, **dict.fromkeys(names, new)}
        return msgspec.structs.replace(ledger, ignored=ignored), None

    shared.change_ledger(site, change, type(None))


def reset(site: Site) -> str:
    """Reset the breaker: earlier drains no longer count.

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
