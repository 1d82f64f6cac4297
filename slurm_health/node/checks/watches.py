# SPDX-License-Identifier: Apache-2.0
"""Trainings on this node whose watch has ended, though they run on."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    NotApplicable,
    NotNegative,
    first_few,
)
from slurm_health.node.checks.tasks import processes
from slurm_health.node.rules.finding import UNWATCHED, Finding, Status, passed, warned
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import cut, one_line
from slurm_health.system import WATCHED

_PROGRESS = 200  # characters of a job's progress


class Watches(Check, frozen=True, kw_only=True):
    """Jobs of this node that are [watched](../howto/watch.md) no more, though they run on.

    The agent of a watched job touches a file in /run/slurm-health/watch once a minute. This check
    makes that directory, reads what a watch has left there of its job's progress, and removes the
    files of jobs that are gone.
    """

    SEVERITY = Status.WARN
    CONTEXTS = ("healthcheck",)

    # Since the agent last touched its file.
    max_silence_s: NotNegative = 300.0

    def measure(self, machine: CheckContext) -> Finding:
        """Look at the files, and, if one is old, for processes of its job."""
        directory = machine.path(WATCHED)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(stat.S_ISVTX | 0o777)
        except OSError as err:
            raise Unmeasured(f"{WATCHED}: {err.strerror}") from err
        ages_s: dict[str, float] = {}
        shown: dict[str, str] = {}
        for name in machine.entries(WATCHED):
            uid, _, job = name.partition(".")
            with contextlib.suppress(OSError):
                status = (directory / name).lstat()
                if stat.S_ISREG(status.st_mode) and uid == str(status.st_uid) and job.isdecimal():
                    ages_s[name] = machine.now_s - status.st_mtime
                    if status.st_size and ages_s[name] <= self.max_silence_s:
                        shown[job] = _progress(directory / name)
        if not ages_s:
            raise NotApplicable("no job here is watched")
        silent = [name for name, age_s in ages_s.items() if age_s > self.max_silence_s]
        here = _jobs(machine) if silent else set()
        blind = []
        for name in silent:
            job = name.partition(".")[2]
            if job in here:
                since = time.strftime("%H:%M", time.localtime(machine.now_s - ages_s[name]))
                blind.append(f"{since}: {job}")
            else:
                (directory / name).unlink(missing_ok=True)
        if blind:
            text = f"jobs on this node are not watched since {first_few(sorted(blind))}"
            return warned(text, **{UNWATCHED: len(blind)})
        watched = len(ages_s) - len(silent)
        return passed("every watch is alive", watched=watched, **{UNWATCHED: 0}, **shown)


def _jobs(machine: CheckContext) -> set[str]:
    """Return the jobs of the processes here, by the beginning of their environments.

    A job that is suspended has only stopped ones, as its watch is.
    """
    jobs = set()
    for task in processes(machine):
        if task.state in {"T", "Z"}:
            continue
        text = machine.read_or_none(f"/proc/{task.pid}/environ") or ""
        jobs |= {word[13:] for word in text.split("\0") if word.startswith("SLURM_JOB_ID=")}
    return jobs


def _progress(path: Path) -> str:
    """Return what a watch has left of its job's progress: a user's text."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return cut(one_line(os.read(file, 1024).decode(errors="replace")), _PROGRESS)
        finally:
            os.close(file)
    return ""
