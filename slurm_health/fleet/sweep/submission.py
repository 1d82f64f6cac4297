# SPDX-License-Identifier: Apache-2.0
"""One run of a sweep: asks Slurm and the history, chooses nodes, submits a job for each group.

A job's journal is in the history once it has begun, and a run asks the history when each node was
checked last: so a sweep that was ended goes on where it stopped.

A check that cannot begin writes no journal, and Slurm forgets its job within minutes. So each job
writes into a file of its own, in a directory of the sweep's user below the root, and the next run
reads these files and removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.fleet.history.index import Index
from slurm_health.fleet.sweep import choice as sweep
from slurm_health.records.errors import ExitCode, UnknownJob, UsageError
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted, cut, one_line
from slurm_health.system import private_files
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node

JOB_NAME = "slurm-health-sweep"
# All other jobs go first: the most that every release of Slurm takes from a user.
_NICE = 1_000_000
# An accused node is not checked again so soon, whatever users say about it.
_AGAIN_S = 6 * 3600.0
# A check that has not begun by then is no longer wanted: the next run sees who is idle then.
_WAITS_MIN = 10
# sbatch knows --reservation by so much of it.
_RESERVATION = "--rese"
# The last line of a script that came to its end; one that Slurm ended has none.
_ENDED = "slurm-health sweep: the check ended with"
_LAST_LINE = re.compile(rf"{_ENDED} (\d+)")
_NAME = re.compile(r"(\d+)\.out", re.ASCII)
# With these a check has come to a verdict on its nodes; the last is that it could not tell.
_CHECKED = (ExitCode.HEALTHY, ExitCode.BAD_NODES, ExitCode.INCONCLUSIVE)
# What slurmstepd writes where Slurm ends a job, before it does.
_CANCELLED = re.compile(r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT ")
_NOT_GIVEN_WAY = {
    "DUE TO TIME LIMIT": "ran into its time limit",
    "DUE TO NODE FAILURE": "Slurm lost one of its nodes",
}
_WORDS = 200
# Of the end of a file; a check's table has some kB.
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a sweep is to do; `check` are the words of `slurm-health check`.

    `output` is where a job writes, as sbatch names it.
    """

    partition: str
    share: float
    size: int
    every_s: float
    limit_min: int
    check: Sequence[str]
    sbatch: Sequence[str]
    output: str = "/dev/null"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a run has chosen, and why not more."""

    groups: Sequence[tuple[str, ...]]
    idle: int
    due: int
    in_checks: int
    most: int


def choose(client: Client, index: Index, wishes: Wishes, *, uid: int, now_s: float) -> Turn:
    """Return whom to check now.

    Raises:
        UsageError: there is no such partition.
        SlurmError: Slurm cannot be asked.
    """
    partitions = client.partitions()
    partition = partitions.get(wishes.partition)
    if partition is None:
        there = ", ".join(sorted(partitions))
        raise UsageError(f"Slurm has no partition {wishes.partition!r}; it has {there}")
    cluster = client.cluster_name()
    nodes = client.nodes()
    taken = _in_checks(client, uid)
    reserved = any(word.startswith(_RESERVATION) for word in wishes.sbatch)
    idle = [
        name
        for name in partition.names
        if name not in taken and name in nodes and _may_check(nodes[name], reserved=reserved)
    ]
    in_checks = len(taken.intersection(partition.names))
    checked = index.last_checks(cluster)
    last_s = {name: checked.get(name, 0.0) for name in idle}
    # A check that was cut short, as one that gave way to a job, leaves its nodes due.
    judged = index.last_verdicts(cluster, uid=uid)
    due = {name for name in idle if judged.get(name, 0.0) < now_s - wishes.every_s}
    most = sweep.at_once(len(partition.names), wishes.share)
    return Turn(
        groups=sweep.groups(
            last_s,
            sweep.met(index.checks(cluster), last_s),
            due=due,
            size=wishes.size,
            room=most - in_checks,
        ),
        idle=len(idle),
        due=len(due),
        in_checks=in_checks,
        most=most,
    )


def _may_check(node: Node, *, reserved: bool) -> bool:
    """Tell whether a job of the sweep can begin on a node now.

    On one of a reservation, or one that does not answer Slurm, it waits in vain, run after run, and
    others are not checked meanwhile.
    """
    free = node.idle and not node.out_of_pool and not node.lost
    return free and (reserved or "RESERVED" not in node.states)


def _in_checks(client: Client, uid: int) -> set[str]:
    """Return the nodes of the sweep's jobs that wait or run."""
    taken: set[str] = set()
    for job_id in client.jobs_named(JOB_NAME, uid):
        with contextlib.suppress(UnknownJob):  # it has just ended
            job = client.job(job_id)
            taken.update(job.nodes or job.required)
    return taken


def why_not_now(client: Client, index: Index, node: str, *, uid: int, now_s: float) -> str:
    """Return why one node is not checked again now; empty if it is.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    if node in _in_checks(client, uid):
        return f"{node} is being checked"
    judged_s = index.last_verdicts(client.cluster_name(), uid=uid).get(node, 0.0)
    if now_s - judged_s < _AGAIN_S:
        return (
            f"{node} was checked {(now_s - judged_s) / 3600:.1f} h ago, limit {_AGAIN_S / 3600:g} h"
        )
    return ""


def options(
    group: Sequence[str], wishes: Wishes, *, partners: int = 0, avoid: Collection[str] = ()
) -> list[str]:
    """Return the options of sbatch for the check of one group.

    Slurm chooses so many `partners` among the free nodes, and none of `avoid`.
    """
    exclude = [f"--exclude={fold(avoid)}"] if avoid else []
    return [
        f"--job-name={JOB_NAME}",
        f"--partition={wishes.partition}",
        f"--nodelist={fold(group)}",
        *exclude,
        f"--nodes={len(group) + partners}",
        "--ntasks-per-node=1",
        "--exclusive",
        f"--nice={_NICE}",
        f"--time={wishes.limit_min}",
        f"--deadline=now+{wishes.limit_min + _WAITS_MIN}minutes",
        "--no-requeue",  # preempted, it leaves; the next run checks who is idle then
        f"--output={wishes.output}",
        "--chdir=/",
        *wishes.sbatch,
    ]


@dataclass(frozen=True, kw_only=True)
class EndedSweepJob:
    """One job that has ended. `trouble` says why it checked nothing, empty where it did.

    One that gave way to another job has neither checked its nodes nor met with trouble.
    """

    job: int
    checked: bool = False
    undecided: bool = False
    trouble: str = ""


def told(outcomes: Sequence[EndedSweepJob]) -> str:
    """Return what became of the last jobs, for a person; empty where there were none."""
    if not outcomes:
        return ""
    checked = sum(each.checked for each in outcomes)
    have, their = ("has", "its") if len(outcomes) == 1 else ("have", "their")
    ended = f"of {counted(len(outcomes), 'job')} that {have} ended"
    text = f"{ended}, {checked} checked {their} nodes"
    undecided = sum(each.undecided for each in outcomes)
    text += f" ({undecided} could not decide)" if undecided else ""
    failed = [each for each in outcomes if each.trouble]
    left = len(outcomes) - checked - len(failed)
    text += f", {left} gave way" if left else ""
    why = "; ".join(
        f"{trouble} ({_counted([e.job for e in failed if e.trouble == trouble])})"
        for trouble in dict.fromkeys(each.trouble for each in failed)
    )
    return f"{text}, {len(failed)} checked nothing: {why}" if failed else text


def checks_nothing(outcomes: Sequence[EndedSweepJob]) -> bool:
    """Tell whether a person has to look: a job failed, or none of several could decide."""
    failed = any(each.trouble for each in outcomes)
    done = [each for each in outcomes if each.checked]
    return failed or (bool(done) and all(each.undecided for each in done))


def _counted(jobs: Sequence[int]) -> str:
    return f"job {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} jobs, the last {jobs[-1]}"


def script(words: Sequence[str]) -> str:
    """Return the batch script of a check, which says at its end that it came there.

    A shell that is ended waits for the check, which ends its agents first.
    """
    return (
        f"#!/bin/sh\ntrap : TERM\n{shlex.join(words)}\ncode=$?\n"
        f'echo "{_ENDED} $code"\nexit "$code"\n'
    )


def directory(root: Path, uid: int) -> Path:
    """Return where a user's jobs write below the journals' root; no cluster is called so."""
    return root / f".sweep-{uid}"


def prepare(root: Path, uid: int) -> str:
    """Make that directory; return why that cannot be, empty where it is there."""
    try:
        with private_files.directory(root, directory(root, uid).name, owner=uid, make=True) as own:
            found = os.fstat(own)
    except OSError as err:
        return err.strerror or str(err)
    return "" if found.st_uid == uid else f"it belongs to user {found.st_uid}"


def begun(root: Path, uid: int) -> set[int]:
    """Return the jobs that have begun to write, and have not been told of since."""
    with (
        contextlib.suppress(OSError),
        private_files.directory(root, directory(root, uid).name, owner=uid) as own,
    ):
        return set(_files(own))
    return set()


def ended(root: Path, uid: int, jobs: Collection[int]) -> list[EndedSweepJob]:
    """Return what became of these jobs, as far as they have written, and forget them."""
    found = []
    with (
        contextlib.suppress(OSError),
        private_files.directory(root, directory(root, uid).name, owner=uid) as own,
    ):
        for job, name in _files(own).items():
            if job not in jobs:
                continue
            try:
                found.append(_outcome(job, _end_of(own, name)))
                os.unlink(name, dir_fd=own)
            except OSError as err:
                trouble = f"its output cannot be read: {err.strerror or err}"
                found.append(EndedSweepJob(job=job, trouble=trouble))
    return sorted(found, key=lambda each: each.job)


def _files(own: int) -> dict[int, str]:
    """Return the names of the jobs' files in a directory that is held open."""
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=own)
    try:
        names = os.listdir(listing)  # noqa: PTH208 - of a directory that is held open
    finally:
        os.close(listing)
    return {int(match[1]): match[0] for name in names if (match := _NAME.fullmatch(name))}


def _end_of(own: int, name: str) -> bytes:
    """Return the end of a file in a directory that is ours alone."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=own)
    try:
        return os.pread(file, _MOST_BYTES, max(0, os.fstat(file).st_size - _MOST_BYTES))
    finally:
        os.close(file)


def _outcome(job: int, written: bytes) -> EndedSweepJob:
    lines = [line for line in written.decode(errors="replace").splitlines() if line.strip()]
    last = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if last is None or any(_CANCELLED.search(line) for line in lines):
        cut_off = [line for line in lines if _CANCELLED.search(line)]
        troubles = (
            trouble
            for why, trouble in _NOT_GIVEN_WAY.items()
            if any(why in line for line in cut_off)
        )
        return EndedSweepJob(job=job, trouble=next(troubles, ""))
    code = int(last[1])
    if code in _CHECKED:
        return EndedSweepJob(job=job, checked=True, undecided=code == ExitCode.INCONCLUSIVE)
    said = cut(one_line(lines[-2]), _WORDS) if len(lines) > 1 else "it says nothing"
    return EndedSweepJob(job=job, trouble=f"its check ended with {code}: {said}")
