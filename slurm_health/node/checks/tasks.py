# SPDX-License-Identifier: Apache-2.0
"""Processes: load, leftovers of a job, and daemons that must run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    NotApplicable,
    NotNegative,
    first_few,
)
from slurm_health.node.rules.finding import Finding, Status, node_fault, passed, user_fault, warned
from slurm_health.records.errors import Unmeasured
from slurm_health.system.proc import Stat, parse_stat

PROCESSES = "processes"
_COMM_LENGTH = 15  # the kernel cuts names there
# login.defs(5): accounts of people begin here, and any of them can give a process any name.
_FIRST_PERSON = 1000


def processes(machine: CheckContext) -> Sequence[Stat]:
    """Return every process, read once for all checks of a child."""

    def read() -> Iterator[Stat]:
        for entry in machine.entries("/proc"):
            if entry.isdigit():
                with contextlib.suppress(Unmeasured, ValueError):  # it has ended meanwhile
                    yield parse_stat(machine.read(f"/proc/{entry}/stat"))

    return machine.once(PROCESSES, lambda: list(read()))


def owner(machine: CheckContext, pid: int) -> int | None:
    """Return the user who started a process, None if it has ended.

    /proc/PID itself belongs to root if the process has made itself undumpable.
    """
    status = machine.read_or_none(f"/proc/{pid}/status") or ""
    match = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else None


def _named(tasks: list[Stat]) -> str:
    return first_few([f"{task.name}({task.pid})" for task in tasks])


class Load(Check, frozen=True, kw_only=True):
    """Load per CPU before a job begins. High load names no culprit, so it never drains."""

    TOGETHER = True
    SEVERITY = Status.WARN
    CONTEXTS = ("prolog",)

    # Over five minutes; more is a warning.
    max_per_cpu: NotNegative = 2.0

    def measure(self, machine: CheckContext) -> Finding:
        """Read /proc/loadavg."""
        load = float(machine.read("/proc/loadavg").split()[1])
        cpus = count_cpus(machine.read("/sys/devices/system/cpu/online"))
        text = f"load {load:g} over 5 min"
        if load / cpus > self.max_per_cpu:
            limit = f"limit {self.max_per_cpu:g} per CPU"
            return warned(f"{text} on {cpus} CPUs, {limit}", load=load)
        return passed(text, load=load)


def count_cpus(ranges: str) -> int:
    """Count the CPUs in the kernel's notation, `0-3,8`.

    Raises:
        Unmeasured: it is not such a text.
    """
    total = 0
    for part in ranges.strip().split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise Unmeasured(f"cannot read {ranges.strip()!r} as CPUs")
        total += int(high or low) - int(low) + 1
    return total


class Leftovers(Check, frozen=True, kw_only=True):
    """Processes of the job that has just ended, by its user and the job id in their environment.

    They are named and left alone: Slurm ends them with `ProctrackType=proctrack/cgroup`.
    """

    SEVERITY = Status.USER_FAULT
    CONTEXTS = ("epilog",)

    def measure(self, machine: CheckContext) -> Finding:
        """Look through the processes of the job's user."""
        job = machine.environ.get("SLURM_JOB_ID", "")
        uid = machine.environ.get("SLURM_JOB_UID", "")
        if not job.isdecimal() or not uid.isdecimal() or int(uid) == 0:
            raise NotApplicable("not called for a job of an ordinary user")
        wanted = {f"SLURM_JOB_ID={job}", f"SLURM_JOBID={job}"}
        left = [
            task
            for task in processes(machine)
            if task.state != "Z"
            and owner(machine, task.pid) == int(uid)
            # A process may make its environment as large as it likes: only the beginning is read.
            and wanted & set((machine.read_or_none(f"/proc/{task.pid}/environ") or "").split("\0"))
        ]
        if left:
            return user_fault(f"left running by the job: {_named(left)}")
        return passed("the job left no processes")


class Daemon(Check, frozen=True, kw_only=True):
    """A process of this name runs."""

    TOGETHER = True
    READS = PROCESSES

    # As `ps -o comm` shows it.
    name: Annotated[str, msgspec.Meta(min_length=1)]
    # Who started it; empty: a system account (user id below 1000), since anyone can name a program
    # so.
    user: str = ""

    def measure(self, machine: CheckContext) -> Finding:
        """Look through /proc."""
        count = self.count(machine)
        whose = f"of {self.user or 'a system account'}"
        if not count:
            return node_fault(f"no process {self.name} {whose}")
        return passed(f"{self.name} {whose} runs", count=count)

    def count(self, machine: CheckContext) -> int:
        """Return how many there are.

        Raises:
            Unmeasured: there is no such user.
        """
        uids: Sequence[int] = range(_FIRST_PERSON)
        if self.user:
            import pwd

            try:
                uids = [pwd.getpwnam(self.user).pw_uid]
            except KeyError as err:
                raise Unmeasured(f"there is no user {self.user} here") from err
        name = self.name[:_COMM_LENGTH]
        named = [task for task in processes(machine) if task.name == name and task.state != "Z"]
        return sum(owner(machine, task.pid) in uids for task in named)
