# SPDX-License-Identifier: Apache-2.0
"""Processes: load, zombies, those the kernel holds, leftovers of a job; daemons that must run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotNegative,
    Seen,
    Unmeasured,
    first_few,
)
from slurm_health.node.rules.finding import Finding, Status, node_fault, passed, user_fault, warned
from slurm_health.records.text import counted
from slurm_health.system.proc import Stat, parse_stat

PROCESSES = "processes"
_COMM_LENGTH = 15  # the kernel cuts names there
# login.defs(5): accounts of people begin here, and any of them can give a process any name.
_FIRST_PERSON = 1000
_PASSING = ("activating", "reloading", "deactivating")


def processes(machine: CheckContext) -> Sequence[Stat]:
    """Return every process, as the first check of a child has seen them."""
    return machine.once(PROCESSES, lambda: list(_processes_now(machine)))


def _processes_now(machine: CheckContext) -> Iterator[Stat]:
    """Yield every process; those that end meanwhile are left out."""
    for entry in machine.entries("/proc"):
        if entry.isdigit():
            with contextlib.suppress(Unmeasured, ValueError):
                yield parse_stat(machine.read(f"/proc/{entry}/stat"))


def owner(machine: CheckContext, pid: int) -> int | None:
    """Return the user who started a process, None when it has ended.

    /proc/PID itself belongs to root when the process has made itself undumpable.
    """
    status = machine.read_or_none(f"/proc/{pid}/status") or ""
    found = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else None


def _named(found: list[Stat]) -> str:
    return first_few([f"{each.name}({each.pid})" for each in found])


class LoadSeen(Seen, frozen=True, kw_only=True):
    """Load averages over 1, 5 and 15 minutes, and how many CPUs there are."""

    load: tuple[float, float, float]
    cpus: int


class Load(Check, frozen=True, kw_only=True):
    """Load per CPU before a job begins. High load names no culprit, so it never drains."""

    SEEN = LoadSeen
    TOGETHER = True
    SEVERITY = Status.WARN
    CONTEXTS = ("prolog",)

    max_per_cpu_1min: NotNegative | None = None
    max_per_cpu_5min: NotNegative | None = 2.0
    max_per_cpu_15min: NotNegative | None = None

    def collect(self, machine: CheckContext) -> LoadSeen:
        """Read /proc/loadavg and count the CPUs that are online."""
        words = machine.read("/proc/loadavg").split()
        online = machine.read("/sys/devices/system/cpu/online")
        return LoadSeen(
            load=(float(words[0]), float(words[1]), float(words[2])), cpus=count_cpus(online)
        )

    def judge(self, seen: LoadSeen) -> Finding:
        """Compare each average that has a limit."""
        limits = (self.max_per_cpu_1min, self.max_per_cpu_5min, self.max_per_cpu_15min)
        for minutes, load, limit in zip((1, 5, 15), seen.load, limits, strict=True):
            per_cpu = load / seen.cpus
            if limit is not None and per_cpu > limit:
                return warned(
                    f"load {load:g} over {minutes} min on {seen.cpus} CPUs, limit {limit:g} each",
                    load=load,
                )
        return passed(f"load {seen.load[0]:g}", load=seen.load[0])


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


class Zombies(Check, frozen=True, kw_only=True):
    """Processes that have ended and whose parents do not take notice."""

    SEEN = list[Stat]
    TOGETHER = True
    LOOKS_AT = PROCESSES
    SEVERITY = Status.WARN

    max_count: Count = 50

    def collect(self, machine: CheckContext) -> list[Stat]:
        """Look for state Z."""
        return [each for each in processes(machine) if each.state == "Z"]

    def judge(self, seen: list[Stat]) -> Finding:
        """A few are always passing through."""
        count = len(seen)
        if count > self.max_count:
            return warned(f"{counted(count, 'zombie')}, limit {self.max_count}: {_named(seen)}")
        return passed(counted(count, "zombie"), zombies=count)


class Uninterruptible(Check, frozen=True, kw_only=True):
    """Processes the kernel holds (state D), seen twice in a row: dead storage or a dead device.

    It names what hangs. What it hangs on it cannot tell, and a filesystem that is down hangs the
    same processes on every node, so this warns and does not drain unless a site says so.
    """

    SEEN = list[Stat]
    TOGETHER = True
    LOOKS_AT = PROCESSES
    SEVERITY = Status.WARN

    max_count: Count = 10
    apart_s: Annotated[float, msgspec.Meta(ge=0.01, le=60)] = 0.05

    def collect(self, machine: CheckContext) -> list[Stat]:
        """Look for state D, wait a little, look again; most are there for a moment only."""
        import time

        first = {each.pid for each in processes(machine) if each.state == "D"}
        if len(first) <= self.max_count:
            return []
        time.sleep(self.apart_s)
        now = _processes_now(machine)
        return [each for each in now if each.state == "D" and each.pid in first]

    def judge(self, seen: list[Stat]) -> Finding:
        """Many that stay are a sign."""
        count = len(seen)
        if count > self.max_count:
            text = f"{count} processes stuck in the kernel, limit {self.max_count}"
            return warned(f"{text}: {_named(seen)}", stuck=count)
        return passed("no pile-up of processes stuck in the kernel", stuck=count)


class Leftovers(Check, frozen=True, kw_only=True):
    """Processes of the job that has just ended, found by the job's number in their environment.

    Only processes of the job's own user count, so other jobs, and other people, are never meant.
    """

    SEEN = list[Stat]
    SEVERITY = Status.USER_FAULT
    CONTEXTS = ("epilog",)

    def collect(self, machine: CheckContext) -> list[Stat]:
        """Look through the processes of the job's user."""
        return of_job(machine)

    def judge(self, seen: list[Stat]) -> Finding:
        """Whatever is left is the job's doing."""
        if seen:
            return user_fault(f"left running by the job: {_named(seen)}")
        return passed("the job left no processes")


def of_job(machine: CheckContext) -> list[Stat]:
    """Return the processes that belong to the job the hook is called for.

    Raises:
        Unmeasured: the hook is not called for a job of an ordinary user.
    """
    job, uid = machine.environ.get("SLURM_JOB_ID", ""), machine.environ.get("SLURM_JOB_UID", "")
    if not job.isdecimal() or not uid.isdecimal() or int(uid) == 0:
        raise Unmeasured("not called for a job of an ordinary user")
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_JOBID={job}"}
    return [
        each
        for each in processes(machine)
        if each.state != "Z"
        and owner(machine, each.pid) == int(uid)
        and wanted & set(_environment(machine, each.pid))
    ]


def _environment(machine: CheckContext, pid: int) -> list[str]:
    # A process may make its own as large as it likes.
    return (machine.read_or_none(f"/proc/{pid}/environ") or "").split("\0")


class Daemon(Check, frozen=True, kw_only=True):
    """A process of this name runs, of this user or, where none is named, of a system account."""

    SEEN = int
    TOGETHER = True
    LOOKS_AT = PROCESSES

    name: Annotated[str, msgspec.Meta(min_length=1)]
    user: str = ""
    min_count: Annotated[int, msgspec.Meta(ge=1)] = 1

    def collect(self, machine: CheckContext) -> int:
        """Look through /proc."""
        name = self.name[:_COMM_LENGTH]
        uids = {_uid(self.user)} if self.user else range(_FIRST_PERSON)
        found = [each for each in processes(machine) if each.name == name and each.state != "Z"]
        return sum(owner(machine, each.pid) in uids for each in found)

    def judge(self, seen: int) -> Finding:
        """A daemon that should run and does not is the node's fault."""
        whose = f" of {self.user or 'a system account'}"
        if seen < self.min_count:
            text = f"{seen} {self.name} processes{whose}, limit {self.min_count}"
            return node_fault(text, count=seen)
        return passed(f"{self.name}{whose} runs", count=seen)


def _uid(user: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError as err:
        raise Unmeasured(f"there is no user {user} here") from err


class UnitSeen(Seen, frozen=True, kw_only=True):
    """A unit's state as systemd tells it."""

    load: str
    active: str
    sub: str


class Unit(Check, frozen=True, kw_only=True):
    """A systemd unit is active."""

    SEEN = UnitSeen

    unit: Annotated[str, msgspec.Meta(pattern=r"^[\w@.:\\-]+$")]

    def collect(self, machine: CheckContext) -> UnitSeen:
        """Ask systemctl."""
        from slurm_health.node.checks.external import run_program

        argv = ["systemctl", "show", "--property=LoadState,ActiveState,SubState", "--", self.unit]
        ran = run_program(argv, machine)
        fields = dict(line.partition("=")[::2] for line in ran.output.splitlines())
        if ran.code != 0 or not fields.get("ActiveState"):
            raise Unmeasured(f"systemctl: {ran.output.strip() or ran.said}")
        return UnitSeen(
            load=fields.get("LoadState", ""),
            active=fields["ActiveState"],
            sub=fields.get("SubState", ""),
        )

    def judge(self, seen: UnitSeen) -> Finding:
        """On its way to another state is neither well nor broken."""
        if seen.load == "not-found":
            return node_fault(f"there is no unit {self.unit}")
        if seen.active in _PASSING:
            return warned(f"{self.unit} is {seen.active}")
        if seen.active != "active":
            return node_fault(f"{self.unit} is {seen.active} ({seen.sub})")
        return passed(f"{self.unit} is active")
