# SPDX-License-Identifier: Apache-2.0
"""Daemons that must run, as processes or as systemd units."""

from __future__ import annotations

from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Seen
from slurm_health.node.checks.tasks import PROCESSES, owner, processes
from slurm_health.node.rules.finding import Finding, node_fault, passed, warned
from slurm_health.records.errors import Unmeasured

_COMM_LENGTH = 15  # the kernel cuts names there
# login.defs(5): accounts of people begin here, and any of them can give a process any name.
_FIRST_PERSON = 1000
_PASSING = ("activating", "reloading", "deactivating")


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
