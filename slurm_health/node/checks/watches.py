# SPDX-License-Identifier: Apache-2.0
"""Trainings on this node whose watch has ended, though they run on."""

from __future__ import annotations

import contextlib
import stat

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    NotApplicable,
    NotNegative,
    first_few,
)
from slurm_health.node.checks.tasks import processes
from slurm_health.node.rules.finding import Finding, Status, passed, warned
from slurm_health.records.errors import Unmeasured
from slurm_health.system import WATCHED


class Watches(Check, frozen=True, kw_only=True):
    """Jobs of this node that are [watched](../howto/watch.md) no more, though they run on.

    The agent of a watched job touches a file in /run/slurm-health/watch once a minute. This check
    makes that directory, and removes the files of jobs that are gone.
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
        ages_s = {}
        for name in machine.entries(WATCHED):
            uid, _, job = name.partition(".")
            with contextlib.suppress(OSError):
                status = (directory / name).lstat()
                if stat.S_ISREG(status.st_mode) and uid == str(status.st_uid) and job.isdecimal():
                    ages_s[name] = machine.now_s - status.st_mtime
        if not ages_s:
            raise NotApplicable("no job here is watched")
        silent = [name for name, age_s in ages_s.items() if age_s > self.max_silence_s]
        here = _jobs(machine) if silent else set()
        blind = []
        for name in silent:
            job = name.partition(".")[2]
            if job in here:
                blind.append(f"{job} (for {ages_s[name] / 60:.0f} min)")
            else:
                (directory / name).unlink(missing_ok=True)
        if blind:
            return warned(f"not watched any more: job {first_few(blind)}", unwatched=len(blind))
        return passed("every watch is alive", watched=len(ages_s) - len(silent))


def _jobs(machine: CheckContext) -> set[str]:
    """Return the jobs of the processes here, by the beginning of their environments."""
    jobs = set()
    for task in processes(machine):
        text = machine.read_or_none(f"/proc/{task.pid}/environ") or ""
        jobs |= {word[13:] for word in text.split("\0") if word.startswith("SLURM_JOB_ID=")}
    return jobs
