# SPDX-License-Identifier: Apache-2.0
"""Local NVMe drives: all there, not read-only, not worn out, no data lost; by smartctl or nvme."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotNegative,
    Seen,
    exchange,
)
from slurm_health.node.checks.external import is_there, json_in, run_program
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    passed,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

_BASE = "/sys/class/nvme"
_PROGRAMS = ("smartctl", "nvme")
# Bits of the critical warning (NVM Express base specification 2.0, figure 207).
_FAULTS = {0x04: "its reliability is degraded", 0x08: "it can only be read"}
_WARNINGS = {
    0x01: "its spare blocks are used up",
    0x02: "it is too hot or too cold",
    0x10: "what protects its cache at a power loss has failed",
}


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One controller. None: it does not say; `unasked`: why its log could not be read."""

    state: str = ""
    critical_warning: int | None = None
    used_percent: int | None = None
    media_errors: int | None = None
    unasked: str = ""


class NvmeSeen(Seen, frozen=True, kw_only=True):
    """The drives by name, and how many media errors each had at the last run, `age_s` ago."""

    drives: dict[str, Drive]
    before: dict[str, int] | None = None
    age_s: float = 0.0


class Nvme(Check, frozen=True, kw_only=True):
    """Every drive in the node itself; those reached over a network are none of its own."""

    SEEN = NvmeSeen
    COMPONENTS = ("node", "storage")
    CONTEXTS = ("healthcheck", "retest")

    # smartctl or nvme; empty: smartctl where it is installed, else nvme.
    program: str = ""
    # How many there should be; 0: as many as there are.
    count: Count = 0
    # Of what the manufacturer promises; a drive goes on beyond 100.
    max_used_percent: NotNegative = 100.0
    # Blocks that could not be read back right, since the last run on this node.
    max_media_errors: Count = 0

    def collect(self, machine: CheckContext) -> NvmeSeen:
        """Read /sys/class/nvme, and ask each drive for its health log."""
        names = local_drives(machine)
        if not names and not self.count:
            raise Unmeasured("there is no NVMe drive")
        drives = {name: _ask(machine, name, self.program) for name in names}
        errors = {
            name: drive.media_errors
            for name, drive in drives.items()
            if drive.media_errors is not None
        }
        before, age_s = exchange(machine, f"nvme.{machine.context}", errors, dict[str, int])
        return NvmeSeen(drives=drives, before=before, age_s=age_s)

    def judge(self, seen: NvmeSeen) -> Finding:
        """A drive that is gone, dead or read-only is a fault; wear and lost blocks are warnings."""
        parts = [passed("", drives=len(seen.drives))]
        if len(seen.drives) < self.count:
            text = f"{counted(len(seen.drives), 'NVMe drive')}, expected {self.count}"
            parts.append(node_fault(text, expected=self.count))
        for name, drive in seen.drives.items():
            parts += self._drive(name, drive, (seen.before or {}).get(name), seen.age_s)
        return joined(parts, well=f"{counted(len(seen.drives), 'NVMe drive')} healthy")

    def _drive(self, name: str, drive: Drive, before: int | None, age_s: float) -> list[Finding]:
        if drive.state == "dead":
            return [node_fault(f"{name}: the kernel has given it up")]
        if drive.unasked:
            return [inconclusive(f"{name}: {drive.unasked}")]
        warning = drive.critical_warning or 0
        found = [node_fault(f"{name}: {text}") for bit, text in _FAULTS.items() if warning & bit]
        found += [warned(f"{name}: {text}") for bit, text in _WARNINGS.items() if warning & bit]
        used = drive.used_percent
        if used is not None and used >= self.max_used_percent:
            text = f"{name}: {used} % of its life are used, limit {self.max_used_percent:g}"
            found.append(warned(text, used_percent=used))
        errors = (drive.media_errors or 0) - (drive.media_errors or 0 if before is None else before)
        if errors > self.max_media_errors:
            text = f"{name}: {counted(errors, 'block')} could not be read right in {age_s:.0f} s"
            found.append(warned(text, media_errors=errors))
        return found


def local_drives(machine: CheckContext) -> list[str]:
    """Return the controllers that sit in the node: `nvme0` and so on."""
    return [
        name
        for name in machine.entries(_BASE)
        if machine.read_or_none(f"{_BASE}/{name}/transport") in {"pcie", None}
    ]


def _ask(machine: CheckContext, name: str, program: str) -> Drive:
    state = machine.read_or_none(f"{_BASE}/{name}/state") or ""
    if state == "dead":  # to ask it may take until the time limit
        return Drive(state=state)
    program = program or next((each for each in _PROGRAMS if is_there(each, machine)), _PROGRAMS[0])
    of_smartctl = Path(program).name != "nvme"
    arguments = ["--json=c", "-H", "-A"] if of_smartctl else ["smart-log", "-o", "json"]
    try:
        seen = run_program([program, *arguments, f"/dev/{name}"], machine)
    except Unmeasured as err:
        return Drive(state=state, unasked=str(err))
    document = json_in(seen.output)
    log = _health_log(document)
    if log is None:
        return Drive(state=state, unasked=_why_not(document) or seen.said or f"exit {seen.code}")
    return Drive(
        state=state,
        critical_warning=_number(log, "critical_warning"),
        used_percent=_number(log, "percentage_used", "percent_used"),
        media_errors=_number(log, "media_errors"),
    )


def _health_log(document: object) -> Mapping[str, Any] | None:
    if not isinstance(document, dict):
        return None
    log = document.get("nvme_smart_health_information_log", document)
    return log if isinstance(log, dict) and "critical_warning" in log else None


def _why_not(document: object) -> str:
    """Return smartctl's own words for why it has no log."""
    told = document.get("smartctl") if isinstance(document, dict) else None
    messages = told.get("messages") if isinstance(told, dict) else None
    words = [each.get("string") for each in messages or [] if isinstance(each, dict)]
    return "; ".join(str(each) for each in words if each)


def _number(log: Mapping[str, Any], *names: str) -> int | None:
    """Return a number by its name of smartctl or of nvme-cli.

    Newer releases of nvme-cli give the warning as an object of bits.
    """
    for name in names:
        value = log.get(name)
        if isinstance(value, dict):
            value = value.get("value")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
