# SPDX-License-Identifier: Apache-2.0
"""What the board's own controller (BMC) knows: fans, power supplies, memory, by `ipmitool`."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative, Seen
from slurm_health.node.checks.external import run_program
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

Judged = Annotated[str, msgspec.Meta(pattern="^(warn|fault|ignore)$")]
# Numbers of the entities that sensors belong to (IPMI 2.0, table 43-13).
_POWER = frozenset({10, 19})  # a power supply; the unit that joins several
_FANS = frozenset({29, 30})  # a fan; a cooling unit
# What `sdr` says of a sensor that is beyond its critical or its non-recoverable threshold. A fan
# that has stopped is below the lower one.
_CRITICAL = frozenset({"cr", "nr", "lcr", "lnr", "ucr", "unr"})
# Words of ipmitool's tables of events (ipmi_sel.h) for states that a sensor is in.
_BROKEN = re.compile(
    r"Failure detected|Predictive failure|AC lost|AC out-of-range|Power Supply Inactive"
    r"|Config Error|Redundancy Lost|Redundancy Degraded|Non-Redundant"
)
# Of the log's events of the type memory: what a job cannot live with, and what announces it.
_MEMORY_FAULT = re.compile(r"Uncorrectable ECC|Memory Device Disabled|Parity")
_MEMORY_WARNED = re.compile(r"Correctable ECC|Memory Scrub Failed")
# Of the log's end; a BMC reads an entry in some 10 ms.
_LATEST = 100
# A BMC of a large board has a few hundred sensors; a line has 80 characters.
_OUTPUT_BYTES = 1 << 20
# `11/24/2026 06:50:12`, of newer releases `11/24/26 06:50:12 UTC`
_TIME = re.compile(r"(?P<date>\d{2}/\d{2}/\d{2}(?:\d{2})?)[\s|]+(?P<time>\d{2}:\d{2}:\d{2})")
_SENSOR_FIELDS, _EVENT_FIELDS = 5, 6


class BmcSeen(Seen, frozen=True, kw_only=True):
    """What `ipmitool` printed: sensors, the end of the log, and what time it is for the BMC.

    `returned_s`: how long ago a person returned the node; None where nobody has, of this boot.
    """

    sensors: str
    events: str
    time: str
    returned_s: float | None = None


class Bmc(Check, frozen=True, kw_only=True):
    """Fans, power supplies, and the memory events of the last hours."""

    SEEN = BmcSeen
    COMPONENTS = ("node", "memory")
    # Its sensors take seconds to read, which a job should not wait for.
    CONTEXTS = ("healthcheck", "retest")

    program: str = "ipmitool"
    fans: Judged = "warn"
    power: Judged = "warn"
    memory: Judged = "fault"
    # Older events do not count. By the BMC's own clock, which may differ from the node's.
    window_s: NotNegative = 86400.0

    def collect(self, machine: CheckContext) -> BmcSeen:
        """Ask the BMC of this node three things, through the kernel's driver."""
        return BmcSeen(
            sensors=self._said(machine, "sdr", "elist"),
            events=self._said(machine, "sel", "elist", "last", str(_LATEST)),
            time=self._said(machine, "sel", "time", "get"),
            returned_s=_returned_s(machine),
        )

    def _said(self, machine: CheckContext, *arguments: str) -> str:
        seen = run_program([self.program, *arguments], machine, most_bytes=_OUTPUT_BYTES)
        # An empty log, and a sensor that does not answer, are told by the exit code too.
        if seen.code != 0 and "|" not in seen.output and "SEL has no entries" not in seen.output:
            words = " ".join([self.program, *arguments])
            raise Unmeasured(f"{words}: {seen.said or f'exit code {seen.code}'}")
        return seen.output

    def judge(self, seen: BmcSeen) -> Finding:
        """Judge each sensor of fans and power supplies, then what happened to the memory."""
        sensors = list(_sensors(seen.sensors))
        if not sensors:
            return inconclusive("the BMC shows no sensor")
        parts = [passed("", sensors=len(sensors))]
        for sensor in sensors:
            for entities, judged in ((_FANS, self.fans), (_POWER, self.power)):
                if sensor.entity in entities and (wrong := sensor.wrong):
                    parts += _as_the_site_wants(judged, f"{sensor.name}: {wrong}")
        parts += self._memory(seen)
        return joined(
            parts, well=f"{counted(len(sensors), 'sensor')}, none of fans and power at fault"
        )

    def _memory(self, seen: BmcSeen) -> Iterator[Finding]:
        now = _moment(seen.time)
        if now is None or self.memory == "ignore":
            return
        # Whoever returned the node knew of what came before, as with the kernel's log.
        within_s = min(self.window_s, math.inf if seen.returned_s is None else seen.returned_s)
        told: set[str] = set()
        for event in _events(seen.events):
            age_s = (now - event.at).total_seconds()
            text = f"{event.sensor}: {event.words}"
            # A clock that was set leaves events in the future: nobody knows when those were.
            if not 0 <= age_s <= within_s or text in told:
                continue
            told.add(text)
            if _MEMORY_FAULT.search(event.words):
                yield from _as_the_site_wants(self.memory, text)
            elif _MEMORY_WARNED.search(event.words):
                yield warned(text)


def _returned_s(machine: CheckContext) -> float | None:
    now = machine.boot_time()
    if now is None or not machine.returned_uptime_s:
        return None
    return max(0.0, now.uptime_s - machine.returned_uptime_s)


def _as_the_site_wants(judged: str, text: str) -> list[Finding]:
    if judged == "ignore":
        return []
    return [node_fault(text) if judged == "fault" else warned(text)]


class _Sensor(NamedTuple):
    name: str
    status: str
    entity: int
    reading: str

    @property
    def wrong(self) -> str:
        """What is wrong with what it watches; empty where nothing is, or it has no reading."""
        if self.status in _CRITICAL:
            return f"{self.reading} (beyond its critical threshold)"
        return self.reading if _BROKEN.search(self.reading) else ""


class _Event(NamedTuple):
    at: datetime.datetime
    sensor: str
    words: str


def _sensors(text: str) -> Iterator[_Sensor]:
    """Yield the lines of `sdr elist`: `FAN1 | 41h | ok | 29.1 | 7800 RPM`."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != _SENSOR_FIELDS:
            continue
        entity = fields[3].partition(".")[0].strip()
        if entity.isdecimal():
            yield _Sensor(fields[0], fields[2], int(entity), fields[4])


def _events(text: str) -> Iterator[_Event]:
    """Yield the memory's of `sel elist`: `1 | DATE | TIME | Memory DIMM_A1 | WORDS | Asserted`."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < _EVENT_FIELDS or fields[5] != "Asserted":
            continue
        at = _moment(f"{fields[1]} {fields[2]}")
        if at is not None and fields[3].startswith("Memory"):
            yield _Event(at, fields[3], fields[4])


def _moment(text: str) -> datetime.datetime | None:
    """Return a time of the BMC's clock; None for `Pre-Init` and the like, which is no time."""
    found = _TIME.search(text)
    if found is None:
        return None
    year = "%Y" if len(found["date"]) == len("11/24/2026") else "%y"
    try:
        return datetime.datetime.strptime(  # of the same clock as what it is compared with
            f"{found['date']} {found['time']}", f"%m/%d/{year} %H:%M:%S"
        )
    except ValueError:
        return None
