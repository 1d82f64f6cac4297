# SPDX-License-Identifier: Apache-2.0
"""Drains that Slurm sets by itself: recorded on the node, explained, and lifted if that is safe.

UnkillableStepProgram and the epilog record the processes that a job leaves; the health check binds
that to the drain which Slurm shows, and looks whether its cause is gone. A node learns of a drain
from the list in the shared directory, so that it asks Slurm nothing while all is well: of all
health checks, one a minute starts this module, which asks for all nodes and notifies.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.node import held, notify, repair, shared, state
from slurm_health.node.drain import by_slurm_itself, lift
from slurm_health.node.hook import Hook
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.repair import MARKS, why_not_ours
from slurm_health.node.rules import drain_note
from slurm_health.node.rules import slurm_drain as rules
from slurm_health.node.rules.finding import CheckResult, Remedy, Status, node_fault, with_remedy
from slurm_health.node.rules.recovery import after_test, is_due
from slurm_health.node.rules.settings import Recovery
from slurm_health.node.rules.slurm_drain import SlurmDrain
from slurm_health.node.rules.slurm_reasons import COMPLETING, Return, kind_of
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site, load
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.records.text import cut, one_line
from slurm_health.system import owner
from slurm_health.system.killable import Answered, Broke, run_guarded
from slurm_health.system.private_files import publish
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import CompletingJob, Node
from slurm_health.system.telemetry import send_line

# The nodes' own records, where `nodes` and other nodes read them.
RECORDS = shared.NodeFiles("slurm", SlurmDrain)
_KEPT_S = 86_400.0
# slurmd's own words about a job.
_TELLING = re.compile(r"(?:pro|epi)log failed|rc:\d|slurm_rc =|NOT ENDING|No space|required plugin")
_LOG_BYTES, _MOST_LINES, _LINE = 256 << 10, 5, 160
_SPOOL_BYTES, _SPOOL_INODES = 64 << 20, 1000
_READ_S = 3.0
# The look at all nodes is a process of its own, so it can wait for a message to a job's owner.
_OWNER_S = 20.0
_PATIENCE = 4.0  # a health check has more time than UnkillableStepProgram
# A process that ends in this time needs no reboot: a core dump, or a driver that frees memory.
_REBOOT_AFTER_S = 1800.0


class SlurmList(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm showed at the last look, and what was notified: by name, when."""

    time_s: float
    drains: tuple[SlurmDrain, ...]
    notified: dict[str, float] = {}


# --- what a hook sees of a job's processes -------------------------------------------------------


def record_left(
    site: Site, node: str, job: int, *, uid: int = -1, array: int = 0, now_s: float
) -> SlurmDrain | None:
    """Record the processes of a job that cannot be ended; return the record, None without any."""
    left = held.left_by(job).processes
    if not any(process.killed or process.state in "TZ" for process in left):
        return None
    uids = [process.uid for process in left if process.uid]
    new = SlurmDrain(
        node=node,
        reason="",
        retest=(),
        time_s=now_s,
        kind="kill-task-failed",
        job=job,
        uid=uid if uid >= 0 else next(iter(uids), -1),
        array=array,
        held=left,
    )
    with contextlib.suppress(StoreUnusable), state.drain_lock(site.state, state.AGAIN_LIMIT_S):
        before = state.load_slurm(site.state, node)
        if before is not None and before.job in (0, job):
            new = _with_held(msgspec.structs.replace(before, job=job, array=array), left)
        elif before is not None and before.reason:
            return before  # a drain stands for another job
        state.save(site.state, slurm=new)
    _share(site, new)
    return new


def _with_held(record: SlurmDrain, left: Iterable[rules.HeldProcess]) -> SlurmDrain:
    known = {process.key: process for process in (*record.held, *left)}
    uid = next((one.uid for one in known.values() if one.uid), -1) if record.uid < 0 else record.uid
    return msgspec.structs.replace(record, held=tuple(known.values()), uid=uid)


def sentence(
    site: Site, record: SlurmDrain, now_s: float, others: Iterable[SlurmDrain] = ()
) -> str:
    """Return what happened, what was found, and what returns the node."""
    return rules.sentence(
        record,
        setting=site.recovery.slurm_drains,
        now_s=now_s,
        others=others,
        name_of=shared.user_name,
    )


def leftovers(site: Site, node: str) -> str:
    """Return the recorded processes that are still here; empty for none."""
    record = state.load_slurm(site.state, node)
    return "; ".join(process.text for process in held.alive(record.held)) if record else ""


# --- the health check ----------------------------------------------------------------------------


def watch(hook: Hook, results: Sequence[CheckResult], listed: bytes) -> None:
    """Explain what Slurm has done to this node, and return it if its cause is gone.

    Args:
        hook: of the health check.
        results: of the node's checks.
        listed: the shared list, if it names this node; else empty.
    """
    site, now_s, setting = hook.site, hook.context.now_s, hook.site.recovery.slurm_drains
    before = state.load_slurm(site.state, hook.node)
    lifted_s = state.load(site.state).lifted_s
    try:
        now = hook.controller().node(hook.node)
        record = _record_now(now, before, listed, now_s)
        if record is None:
            state.save(site.state, slurm=None)
            if before is not None:  # it counts for today's waves, and for no later drain
                _share(site, msgspec.structs.replace(before, over_s=now_s))
            return
        record = _with_log(site, record, hook.controller())
        record, stuck, cannot_die = _look(hook, record, now, results)
        settings = Recovery(passes=rules.PASSES, apart_s=site.recovery.apart_s)
        record = after_test(record, all_passed=not stuck, now_s=now_s, settings=settings)
        again = abs(now_s - lifted_s) < _KEPT_S
        record = msgspec.structs.replace(record, state=now.state, stuck=stuck, again=again)
        why_not = rules.why_not_lift(
            record,
            setting=setting,
            others=_others(site, record.node, hook.controller()),
        )
    except SlurmError as err:
        hook.log.warning(f"could not query Slurm: {err}")
        return
    state.save(site.state, slurm=record)
    text = sentence(site, record, now_s)
    if not why_not:
        why_not = _lift(hook, record)
        if not why_not:
            record = msgspec.structs.replace(record, over_s=now_s, lifted=True)
    more = "" if why_not in text else f" ({why_not})"
    hook.log.info(f"{text}{more}" if why_not else f"returned to service: {text}")
    _share(site, record)
    if site.repair.steps and record.row.lifted_by is Return.PROCESSES and cannot_die:
        fault = with_remedy(node_fault(f"cannot be killed: {stuck}"), Remedy.REBOOT)
        failed = [CheckResult(name="held-process", finding=fault)]
        repair.advance(hook, record, now, failed, passes=False)


def _look(
    hook: Hook, record: SlurmDrain, now: Node, results: Sequence[CheckResult]
) -> tuple[SlurmDrain, str, bool]:
    """Return the record with the processes that are there, and what keeps the node out.

    It is empty if the cause of the drain is gone. Also return whether only a boot ends a process.
    """
    site, rule = hook.site, record.row.lifted_by
    left = {process.key: process for process in held.alive(record.held)}
    unread = ""
    if rule in (Return.PROCESSES, Return.SLURM):
        fresh = held.left_by(record.job, patience=_PATIENCE)
        left |= {process.key: process for process in fresh.processes}
        unread = fresh.unread
        record = _with_held(record, left.values())
    ours, unfit = state.load_record(site.state, hook.node), ""
    if rule is Return.ANSWER:
        down = now.states == {"DOWN"} and not any(mark in now.state for mark in MARKS)
        unfit = "" if down else f"it is {now.state}"
    elif rule is not Return.SLURM:
        unfit = why_not_ours(now, record.reason)
    bad = (Status.NODE_FAULT, Status.USER_FAULT, Status.INCONCLUSIVE)
    counted = [result for result in results if not result.shadow]
    # The most telling first.
    obstacles = [process.text for process in left.values()]
    obstacles += [
        f"{name} {why}" for name, why in held.silent(site.state, record.resources).items()
    ]
    answers = len(obstacles) == len(left)
    if rule is Return.SPOOL:
        obstacles.append(_spool_trouble(site, hook.node, hook.controller()))
    obstacles += [f"{r.name}: {r.finding.text}" for r in counted if r.status in bad]
    if ours is not None and not is_due(ours, site.recovery):
        obstacles.append(f"drained by slurm-health before ({ours.reason}), and not over")
    if not any(result.status is Status.PASS for result in counted):
        obstacles.append("no check of this node has passed")  # nothing has tested it
    stuck = "; ".join(filter(None, [*obstacles, unread])) or unfit
    cannot_die = bool(left) and answers and hook.context.now_s - record.time_s >= _REBOOT_AFTER_S
    return record, stuck, cannot_die


def _lift(hook: Hook, record: SlurmDrain) -> str:
    """Return this node to service if Slurm still shows the same; return what went wrong."""
    now_s = hook.context.now_s

    def why_not(now: Node) -> str:
        reason, _, since = drain_note.signed(now.reason)
        same = (reason, since, now.state) == (record.reason, record.since, record.state)
        return "" if same else f"it was changed meanwhile: {now.state}: {now.reason}"

    if problem := lift(
        hook.site, hook.node, hook.controller(), why_not, slurm=None, lifted_s=now_s
    ):
        return problem
    gone = "; ".join(process.text for process in record.held)
    text = f"{record.reason} of {record.since} is over" + (f": gone: {gone}" if gone else "")
    event = NodeEvent(EventKind.RELEASED, hook.node, now_s, text, job=record.job)
    notify.send(hook.site, event)
    return ""


def _record_now(
    now: Node, before: SlurmDrain | None, listed: bytes, now_s: float
) -> SlurmDrain | None:
    """Return the record of what Slurm shows of this node; None if there is nothing of its own."""
    if now.out_of_pool and now.reason and not drain_note.is_ours(now.reason):
        return by_slurm_itself(now, before)
    if before is not None and not before.reason and before.kind != COMPLETING.name:
        # Slurm may yet drain it; and a drain of ours must not end before these processes do.
        young = 0 <= now_s - before.time_s <= rules.KEPT_S
        return before if young or held.alive(before.held) else None
    if "COMPLETING" not in now.states or not listed:
        return None
    with contextlib.suppress(msgspec.DecodeError):
        for drain in from_json(listed, SlurmList).drains:
            if (drain.node, drain.kind) == (now.name, COMPLETING.name):
                return before if before is not None and before.job == drain.job else drain
    return before


def _path_of(node: str, controller: Client, key: str) -> str:
    """Return a path of slurm.conf on this node; empty if it has none."""
    path = controller.config.get(key, "")
    return path.replace("%n", node).replace("%h", node) if path.startswith("/") else ""


def _spool_trouble(site: Site, node: str, controller: Client) -> str:
    path = _path_of(node, controller, "SlurmdSpoolDir")

    def work() -> bytes:
        status = os.statvfs(path)
        if status.f_bavail * status.f_frsize < _SPOOL_BYTES:
            return f"{path} has {status.f_bavail * status.f_frsize >> 20} MiB left".encode()
        if status.f_files and status.f_favail < _SPOOL_INODES:
            return f"{path} has {status.f_favail} inodes left".encode()
        publish(Path(path) / ".slurm-health", bytes(1 << 20))
        (Path(path) / ".slurm-health").unlink()
        return b""

    match run_guarded(site.state, "SlurmdSpoolDir", work, _READ_S):
        case Answered(data=data):
            return data.decode()
        case Broke(reason=reason):
            return f"{path} cannot be written: {reason}"
    return f"{path} does not answer"


def _with_log(site: Site, record: SlurmDrain, controller: Client) -> SlurmDrain:
    """Return the record with slurmd's own lines, read once."""
    path = "" if record.log else _path_of(record.node, controller, "SlurmdLogFile")

    def work() -> bytes:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        job = re.compile(rf"\b{record.job}\b" if record.job else "")
        telling = [line for line in lines if _TELLING.search(line) and job.search(line)]
        return "\n".join(telling[-_MOST_LINES:]).encode()

    match run_guarded(site.state, "slurmd's log", work, _READ_S) if path else None:
        case Answered(data=data) if data:
            lines = [cut(one_line(line), _LINE) for line in data.decode().splitlines()]
            return msgspec.structs.replace(record, log=tuple(lines))
    return record


# --- all nodes -----------------------------------------------------------------------------------


def _share(site: Site, record: SlurmDrain) -> None:
    """Put a record where `nodes` and other nodes read it, in a child; a failure loses it."""

    def work() -> None:
        RECORDS.save(site.breaker, record.node, record)

    if site.breaker.directory:
        with contextlib.suppress(StoreUnusable):
            shared.in_child(site, work, type(None), limit_s=_READ_S)


def drains_of(
    nodes: Mapping[str, Node],
    completing: Iterable[CompletingJob],
    records: Mapping[str, SlurmDrain],
    now_s: float,
) -> list[SlurmDrain]:
    """Return what Slurm has drained or downed by itself, and nodes that a job keeps."""
    drains: dict[str, SlurmDrain] = {}
    for name, node in nodes.items():
        drain = by_slurm_itself(node, records.get(name))
        if drain is not None and kind_of(drain_note.unsigned(node.reason)) is not None:
            drains[name] = drain
    for job in completing:
        if now_s - job.ended_s < rules.COMPLETING_S:
            continue
        for name in job.nodes:
            fresh = SlurmDrain(
                node=name,
                reason="",
                retest=(),
                time_s=job.ended_s,
                kind=COMPLETING.name,
                state=nodes[name].state if name in nodes else "",
                job=job.job,
                uid=job.uid,
                array=job.array if job.array != job.job else 0,
            )
            known = records.get(name)
            if known is not None and known.job == job.job and not known.reason:
                fresh = msgspec.structs.replace(fresh, held=known.held, stuck=known.stuck)
            if name in drains:  # the drain says more, but not after which job
                one = drains[name]
                drains[name] = msgspec.structs.replace(
                    one, job=one.job or fresh.job, uid=fresh.uid if one.uid < 0 else one.uid
                )
            else:
                drains[name] = fresh
    return [drains[name] for name in sorted(drains)]


def _others(site: Site, node: str, controller: Client) -> Iterator[SlurmDrain]:
    """Yield drains of Slurm's on other nodes: those that stand, and those of today's records.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    records = RECORDS.load(site.breaker)
    yield from drains_of(controller.nodes(), (), records, 0.0)
    yield from (one for one in records.values() if one.node != node and one.reason)


def look_at_all(
    site: Site, controller: Client, now_s: float, environ: Mapping[str, str]
) -> SlurmList:
    """Replace the shared list, and notify of what is new in it.

    Messages to owners of jobs find Slurm by `environ`.

    Raises:
        SlurmError: Slurm cannot be asked.
        StoreUnusable: the shared directory cannot be used.
        OSError: the list cannot be written.
    """
    nodes = controller.nodes()
    is_completing = any("COMPLETING" in node.states for node in nodes.values())
    completing = controller.completing() if is_completing else []
    records = RECORDS.load(site.breaker)
    drains = drains_of(nodes, completing, records, now_s)
    path = shared.directory(site.breaker) / shared.SLURM_LIST
    notified: dict[str, float] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        notified = from_json(path.read_bytes(), SlurmList).notified
    notified = {name: at_s for name, at_s in notified.items() if abs(now_s - at_s) < _KEPT_S}
    for group in groups_of(site, drains, records, now_s):
        if group.key not in notified:
            kind, job = EventKind.SLURM_DRAINED, group.drains[0].job
            notify.send(site, NodeEvent(kind, group.nodes, now_s, group.text, job=job))
        notified[group.key] = now_s
    known = (*records.values(), *drains)
    for name, after in rules.culprits(known, now_s, shared.user_name).items():
        if name not in notified:
            _report_culprit(site, name, after, now_s, environ)
        notified[name] = now_s
    seen = SlurmList(time_s=now_s, drains=tuple(drains), notified=notified)
    publish(path, msgspec.json.encode(seen))
    return seen


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a node, or once of all nodes of a wave.

    `key` is the same at every look; `needs_administrator`: it does not return by itself.
    """

    key: str
    nodes: str
    text: str
    drains: tuple[SlurmDrain, ...]
    needs_administrator: bool


def groups_of(
    site: Site, drains: Sequence[SlurmDrain], records: Mapping[str, SlurmDrain], now_s: float
) -> list[Group]:
    """Return what is told of drains of Slurm's: those of a wave together."""
    known = (*drains, *(one for one in records.values() if now_s - one.time_s < _KEPT_S))
    setting = site.recovery.slurm_drains
    waves: dict[str, list[SlurmDrain]] = {}
    texts: dict[str, str] = {}
    for drain in drains:
        one = rules.wave(drain, known)
        key = (
            f"wave {one.cause}" if one else f"{drain.node} {drain.kind} {drain.since or drain.job}"
        )
        waves.setdefault(key, []).append(drain)
        texts[key] = f"{one.text}; for example {drain.node} " if one else ""
    return [
        Group(
            key=key,
            nodes=fold(sorted({drain.node for drain in several})),
            text=texts[key] + sentence(site, several[-1], now_s, known),
            drains=tuple(several),
            needs_administrator=any(
                rules.administrator_needed(drain, setting=setting, others=known)
                for drain in several
            ),
        )
        for key, several in waves.items()
    ]


def _report_culprit(
    site: Site,
    name: str,
    after: Sequence[SlurmDrain],
    now_s: float,
    environ: Mapping[str, str],
) -> None:
    """Notify of a job, an array or a user that costs nodes, and the owner of the last such job."""
    text, uid = rules.culprit_text(name, after), after[0].uid
    last = max(after, key=lambda drain: drain.time_s)
    user = shared.user_name(uid) if uid > 0 else ""
    if user and last.job:
        of_job = {**environ, "SLURM_JOB_ID": str(last.job), "SLURM_HEALTH_CONFIG": site.path}
        if last.array:
            of_job["SLURM_ARRAY_JOB_ID"] = str(last.array)
        owner.tell("nodes", "nodes were lost as it ended", text, of_job, wait_s=_OWNER_S, user=user)
    nodes = fold(sorted({drain.node for drain in after}))
    event = NodeEvent(EventKind.CULPRIT, nodes, now_s, text, job=after[0].job, user=user)
    notify.send(site, event)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Look at all nodes once; return the exit code."""
    site = load(Path(arguments[0]))
    try:
        controller = Client.for_hook(environ, limit_s=site.timing.slurm_s)
        look_at_all(site, controller, time.time(), environ)
    except (SlurmError, StoreUnusable, OSError) as err:
        send_line("warning", f"slurm-health: Slurm's own drains were not looked up: {err}")
        return 1
    finally:
        shared.end_look(site)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
