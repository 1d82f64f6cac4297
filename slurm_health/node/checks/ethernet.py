# SPDX-License-Identifier: Apache-2.0
"""An Ethernet interface: up, fast enough, not flapping, without new errors."""

from __future__ import annotations

from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Count, NotNegative, Seen, exchange
from slurm_health.node.rules.finding import Finding, joined, node_fault, passed, warned

_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors")


class EthernetCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since boot. None: the driver has no such counter."""

    carrier_changes: int | None
    errors: int | None


class EthernetSeen(Seen, frozen=True, kw_only=True):
    """An interface now, and its counters at the last run, `age_s` ago."""

    exists: bool
    operstate: str = ""
    speed_mbit: int | None = None
    duplex: str = ""
    counters: EthernetCounters = EthernetCounters(carrier_changes=None, errors=None)
    before: EthernetCounters | None = None
    age_s: float = 0.0


class Ethernet(Check, frozen=True, kw_only=True):
    """One interface."""

    SEEN = EthernetSeen
    TOGETHER = True
    COMPONENTS = ("node", "network", "nic")

    interface: Annotated[str, msgspec.Meta(pattern=r"^[^/\s]{1,15}$")]
    min_speed_mbit: NotNegative = 0.0
    full_duplex: bool = False
    # Since the last run on this node.
    max_carrier_changes: Count = 4
    max_errors_per_s: NotNegative = 1.0

    def collect(self, machine: CheckContext) -> EthernetSeen:
        """Read /sys/class/net."""
        base = f"/sys/class/net/{self.interface}"
        if not machine.path(base).exists() and machine.entries("/sys/class/net"):
            return EthernetSeen(exists=False)
        operstate = machine.read(f"{base}/operstate").strip()
        counters = EthernetCounters(
            carrier_changes=_number(machine, f"{base}/carrier_changes"),
            errors=_total(machine, [f"{base}/statistics/{name}" for name in _ERRORS]),
        )
        key = f"ethernet.{machine.context}.{self.interface}"
        before, age_s = exchange(machine, key, counters, EthernetCounters)
        return EthernetSeen(
            exists=True,
            operstate=operstate,
            speed_mbit=_number(machine, f"{base}/speed"),
            duplex=machine.read_or_none(f"{base}/duplex") or "",
            counters=counters,
            before=before,
            age_s=age_s,
        )

    def judge(self, seen: EthernetSeen) -> Finding:
        """Down or slow is a fault; flapping and errors are worth a look."""
        if not seen.exists:
            return node_fault(f"there is no interface {self.interface}")
        # Bridges, loopback and virtual interfaces report "unknown" while they work.
        if seen.operstate not in {"up", "unknown"}:
            return node_fault(f"{self.interface} is {seen.operstate}")
        parts = [*self._link(seen), *self._changes(seen)]
        return joined(parts, well=f"{self.interface} is up")

    def _link(self, seen: EthernetSeen) -> list[Finding]:
        found = [passed("link")]
        speed = seen.speed_mbit
        if self.min_speed_mbit and speed is not None and 0 < speed < self.min_speed_mbit:
            text = f"{self.interface} runs at {speed} Mbit/s, limit {self.min_speed_mbit:g}"
            found.append(node_fault(text, speed_mbit=speed))
        if self.full_duplex and seen.duplex == "half":
            found.append(node_fault(f"{self.interface} is half duplex"))
        return found

    def _changes(self, seen: EthernetSeen) -> list[Finding]:
        if seen.before is None:
            return []
        found = []
        flaps = _delta(seen.counters.carrier_changes, seen.before.carrier_changes)
        if flaps > self.max_carrier_changes:
            text = f"{self.interface} lost or gained its link {flaps} times in {seen.age_s:.0f} s"
            found.append(warned(text, carrier_changes=flaps))
        errors = _delta(seen.counters.errors, seen.before.errors)
        if seen.age_s > 0 and errors / seen.age_s > self.max_errors_per_s:
            text = f"{self.interface}: {errors} errors in {seen.age_s:.0f} s"
            found.append(warned(text, errors=errors))
        return found


def _delta(now: int | None, before: int | None) -> int:
    return max(0, now - before) if now is not None and before is not None else 0


def _number(machine: CheckContext, path: str) -> int | None:
    text = machine.read_or_none(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _total(machine: CheckContext, paths: list[str]) -> int | None:
    found = [number for path in paths if (number := _number(machine, path)) is not None]
    return sum(found) if found else None
