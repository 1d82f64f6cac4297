# SPDX-License-Identifier: Apache-2.0
"""One run of a sweep: asks Slurm and the history, chooses nodes, submits a job for each group.

A job's journal is in the history once it has begun, and a run asks the history when each node was
checked last: so a sweep that was ended goes on where it stopped.

A check that cannot begin writes no journal, and Slurm forgets its job within minutes. So each job
writes into a file of its own, in a directory of the sweep's user below the root of the journals,
and the next run reads these files and removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.fleet import partners
from slurm_health.fleet.index import Index
from slurm_health.fleet.partners import FEWEST
from slurm_health.records.errors import ExitCode, JournalError, SlurmError, UnknownJob, UsageError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.text import counted, cut, one_line
from slurm_health.system import journal, private_files
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node

_JOB_NAME = "slurm-health-sweep"
# Nodes that are checked together: one that is bad is told from its partners in two rounds.
_GROUP = 4
# All other jobs go first: the most that every release of Slurm takes from a user.
_NICE = 1_000_000
# An accused node is not checked again so soon, whatever users say about it.
_AGAIN_S = 6 * 3600.0
# A check that has not begun by then is no longer wanted: the next run sees which nodes are idle.
_WAITS_MIN = 10
# sbatch knows --reservation by so much of it.
_RESERVATION = "--rese"
# The last line of a script that came to its end; one that Slurm ended has none.
_ENDED = "slurm-health sweep: the check ended with"
_LAST_LINE = re.compile(rf"{_ENDED} (\d+)")
_OUTPUT = re.compile(r"(\d+)\.out", re.ASCII)
# With these a check has come to a verdict on its nodes; the last is that it could not tell.
_CHECKED = (ExitCode.HEALTHY, ExitCode.BAD_NODES, ExitCode.INCONCLUSIVE)
# What slurmstepd writes when Slurm ends a job; without a reason, or for another job, it gave way.
_CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z]+(?: [A-Z]+)*))?"
)
_GAVE_WAY = (None, "PREEMPTION")
_MOST_WORDS = 200
_MOST_BYTES = 1 << 24  # of one job's output; a check's table has some kB


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What a sweep is to do.

    `check` are the words of `slurm-health check`, `sbatch` further options of sbatch. `share` of
    the partition's nodes may be in checks; a node is due `every_s` after its last verdict.
    """

    partition: str
    share: float
    every_s: float
    limit_min: int
    check: Sequence[str]
    sbatch: Sequence[str] = ()
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job of an earlier run. `trouble` says why it checked nothing, empty if it did.

    One that gave way to another job has neither checked its nodes nor met with trouble.
    """

    job: int
    checked: bool = False
    trouble: str = ""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one run did: lines for standard output, and notes for a person; and how it ends."""

    lines: Sequence[str]
    notes: Sequence[str]
    exit_code: ExitCode


class Sweep:
    """A sweep of one user, whose jobs write below the journals' root."""

    def __init__(self, settings: SweepSettings, root: Path, environ: Mapping[str, str]) -> None:
        """Make the directory that the jobs write in.

        Raises:
            JournalError: it cannot be made, or belongs to another user.
        """
        self._settings = settings
        self._root = root
        self._environ = environ
        self._uid = os.geteuid()
        self._client = Client(environ, patience_s=0)
        self.directory = root / f".sweep-{self._uid}"  # no cluster is called so
        self._notes: list[str] = []
        if not settings.dry_run:
            try:
                name = self.directory.name
                with private_files.directory(root, name, owner=self._uid, make=True) as own:
                    if (owner := os.fstat(own).st_uid) != self._uid:
                        raise JournalError(self.directory, f"belongs to user {owner}")
            except OSError as err:
                raise journal.unusable(self.directory, "written", err) from err

    def run(self, index: Index, *, now_s: float) -> Turn:
        """Submit checks of the nodes that are due, and report what became of earlier jobs.

        Raises:
            UsageError: there is no such partition, or it is too small.
            SlurmError: Slurm cannot be asked.
        """
        settings, client = self._settings, self._client
        # Those that had begun before Slurm says which run: one that another run submits meanwhile
        # is not taken for one that has ended.
        begun = self.begun()
        over = begun.difference(client.unended(self._uid)) if begun else begun
        partitions = client.partitions()
        if settings.partition not in partitions:
            there = ", ".join(sorted(partitions))
            raise UsageError(f"Slurm has no partition {settings.partition!r}; it has {there}")
        names = partitions[settings.partition].names
        most = partners.at_once(len(names), settings.share)
        if most < FEWEST:
            raise UsageError(
                f"a sweep can never check {settings.partition}: it takes {FEWEST} nodes at a time,"
                f" leaves one to jobs, and it has {most + 1}; check them in a job of their own:"
                f" salloc -p {settings.partition} -N {most + 1} slurm-health check"
            )
        nodes, taken, cluster = client.nodes(), self._in_checks(), client.cluster_name()
        idle = [
            name
            for name in names
            if name not in taken and name in nodes and self._may_check(nodes[name])
        ]
        checked = index.last_checks(cluster)
        last_s = {name: checked.get(name, 0.0) for name in idle}
        # A check that was cut short, as one that gave way to a job, leaves its nodes due.
        judged = index.last_verdicts(cluster, uid=self._uid)
        due = {name for name in idle if judged.get(name, 0.0) < now_s - settings.every_s}
        in_checks = len(taken.intersection(names))
        groups = partners.groups(
            last_s,
            partners.meetings(index.groups(cluster), last_s),
            due=due,
            size=_GROUP,
            room=most - in_checks,
        )
        ended = [] if settings.dry_run else self.ended(over)
        lines, refused = [], False
        for group in groups:
            try:
                lines.append(self._submit(self.options(group), fold(group)))
            except SlurmError as err:  # a group that Slurm refuses must not keep the others from it
                self._notes.append(f"{fold(group)} is not checked: {err}")
                refused = True
        if ended:
            self._notes.append(ended_text(ended))
        self._notes.append(
            f"{len(due)} of {len(idle)} idle nodes are due; at most {most} of"
            f" {settings.partition} at a time, and {in_checks} are being checked"
        )
        troubled = any(job.trouble for job in ended)
        exit_code = ExitCode.INCONCLUSIVE if troubled else ExitCode.HEALTHY
        exit_code = ExitCode.UNAVAILABLE if refused else exit_code
        return Turn(lines=lines, notes=self._notes, exit_code=exit_code)

    def check_node(self, index: Index, node: str, avoid: str, *, now_s: float) -> Turn:
        """Submit the check of one node with partners, unless it was checked lately or is being.

        Raises:
            UsageError: `avoid` is no node list.
            SlurmError: Slurm cannot be asked, or refuses the job.
        """
        try:
            named = expand(avoid) if avoid else ()
        except ValueError as err:
            raise UsageError(f"--avoid: {err}") from err
        known = self._client.nodes()
        options = self.options(
            [node], partners=FEWEST - 1, avoid=[n for n in named if n != node and n in known]
        )
        judged = index.last_verdicts(self._client.cluster_name(), uid=self._uid)
        ago_s = now_s - judged.get(node, 0.0)
        if not self._settings.dry_run and node in self._in_checks():
            line = f"{node} is being checked"
        elif not self._settings.dry_run and ago_s < _AGAIN_S:
            line = f"{node} was checked {ago_s / 3600:.1f} h ago, limit {_AGAIN_S / 3600:g} h"
        else:
            line = self._submit(options, f"{node} with {FEWEST - 1} partners")
        return Turn(lines=[line], notes=self._notes, exit_code=ExitCode.HEALTHY)

    def _submit(self, options: Sequence[str], what: str) -> str:
        if self._settings.dry_run:
            return f"sbatch {' '.join(options)}"
        job = self._client.submit(options, script(self._settings.check), self._environ)
        return f"{job}  {what}"

    def _may_check(self, node: Node) -> bool:
        """Tell whether a job of the sweep can begin on a node now.

        On one of a reservation, or one that does not answer Slurm, it waits in vain, run after run,
        and others are not checked meanwhile.
        """
        reserved = any(word.startswith(_RESERVATION) for word in self._settings.sbatch)
        free = node.idle and not node.out_of_pool and not node.lost
        return free and (reserved or "RESERVED" not in node.states)

    def _in_checks(self) -> set[str]:
        """Return the nodes of the sweep's jobs that wait or run."""
        taken: set[str] = set()
        for job_id in self._client.jobs_named(_JOB_NAME, self._uid):
            with contextlib.suppress(UnknownJob):  # it has just ended
                job = self._client.job(job_id)
                taken.update(job.nodes or job.required)
        return taken

    def options(
        self, group: Sequence[str], *, partners: int = 0, avoid: Collection[str] = ()
    ) -> list[str]:
        """Return the options of sbatch for the check of one group.

        Slurm chooses so many `partners` among the free nodes, and none of `avoid`.
        """
        settings = self._settings
        return [
            f"--job-name={_JOB_NAME}",
            f"--partition={settings.partition}",
            f"--nodelist={fold(group)}",
            *([f"--exclude={fold(avoid)}"] if avoid else []),
            f"--nodes={len(group) + partners}",
            "--ntasks-per-node=1",
            "--exclusive",
            f"--nice={_NICE}",
            f"--time={settings.limit_min}",
            f"--deadline=now+{settings.limit_min + _WAITS_MIN}minutes",
            "--no-requeue",  # preempted, it leaves; the next run sees which nodes are idle
            f"--output={self.directory}/%j.out",
            "--chdir=/",
            *settings.sbatch,
        ]

    def begun(self) -> set[int]:
        """Return the jobs that have begun to write, and have not been reported since."""
        with contextlib.suppress(OSError), self._opened() as own:
            with private_files.entries(own) as entries:
                names = [_OUTPUT.fullmatch(entry.name) for entry in entries]
            return {int(name[1]) for name in names if name}
        return set()

    def ended(self, jobs: Collection[int]) -> list[EndedJob]:
        """Return what became of these jobs, as far as they have written, and forget them."""
        outcomes = []
        with contextlib.suppress(OSError), self._opened() as own:
            for job in sorted(jobs):
                try:
                    written = private_files.read(own, f"{job}.out", most_bytes=_MOST_BYTES)
                    outcomes.append(_outcome(job, written))
                    os.unlink(f"{job}.out", dir_fd=own)
                except FileNotFoundError:
                    continue
                except OSError as err:
                    trouble = f"its output cannot be read: {err.strerror or err}"
                    outcomes.append(EndedJob(job=job, trouble=trouble))
        return outcomes

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        return private_files.directory(self._root, self.directory.name, owner=self._uid)


def script(words: Sequence[str]) -> str:
    """Return the batch script of a check, which says at its end that it came there.

    A shell that is ended waits for the check, which ends its agents first.
    """
    return (
        f"#!/bin/sh\ntrap : TERM\n{shlex.join(words)}\ncode=$?\n"
        f'echo "{_ENDED} $code"\nexit "$code"\n'
    )


def ended_text(jobs: Sequence[EndedJob]) -> str:
    """Return what became of jobs, for a person."""
    have, their = ("has", "its") if len(jobs) == 1 else ("have", "their")
    checked = sum(job.checked for job in jobs)
    failed = [job for job in jobs if job.trouble]
    gave_way = len(jobs) - checked - len(failed)
    text = f"of {counted(len(jobs), 'job')} that {have} ended, {checked} checked {their} nodes"
    text += f", {gave_way} gave way" if gave_way else ""
    if not failed:
        return text
    by_trouble: dict[str, list[int]] = {}
    for job in failed:
        by_trouble.setdefault(job.trouble, []).append(job.job)
    why = "; ".join(
        f"{trouble} ({'job' if len(ids) == 1 else f'{len(ids)} jobs, the last'} {ids[-1]})"
        for trouble, ids in by_trouble.items()
    )
    return f"{text}, {len(failed)} checked nothing: {why}"


def _outcome(job: int, written: bytes) -> EndedJob:
    lines = [line for line in written.decode(errors="replace").splitlines() if line.strip()]
    cancelled = [match[1] for line in lines if (match := _CANCELLED.search(line))]
    last = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if last is None or cancelled:
        why = next((reason for reason in cancelled if reason not in _GAVE_WAY), "")
        return EndedJob(job=job, trouble=f"Slurm ended it: {why.lower()}" if why else "")
    code = int(last[1])
    if code in _CHECKED:
        return EndedJob(job=job, checked=True)
    why = cut(one_line(lines[-2]), _MOST_WORDS) if len(lines) > 1 else "no output"
    return EndedJob(job=job, trouble=f"its check ended with {code}: {why}")
