# SPDX-License-Identifier: Apache-2.0
"""What a node is connected by.

InfiniBand and RoCE ports: present, active, at full rate, without new errors. An Ethernet interface:
up, fast enough, not flapping, without new errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Count, NotNegative, Seen, exchange
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

_BASE = "/sys/class/infiniband"
# Counters of the port, by the names of the kernel's sysfs interface.
_COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors", "local_link_integrity_errors")
Rate = Annotated[float, msgspec.Meta(gt=0)]
_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors")
_SAFE_NAMES = re.compile(r"[\w:.-]{1,150}", re.ASCII)  # a file's has 255 bytes at most


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port as the kernel shows it."""

    state: str
    physical: str
    rate_gbit_per_s: float | None
    is_ethernet: bool = False
    counters: dict[str, int]


class InfiniBandSeen(Seen, frozen=True, kw_only=True):
    """Ports by `device:port`, and the counters of the last run, `age_s` ago."""

    ports: dict[str, Port]
    before: dict[str, dict[str, int]] | None = None
    age_s: float = 0.0


class InfiniBand(Check, frozen=True, kw_only=True):
    """The ports named (`mlx5_0`, `mlx5_0:1`), or as many active ones as there should be."""

    SEEN = InfiniBandSeen
    TOGETHER = True
    COMPONENTS = ("node", "network", "nic")

    ports: tuple[str, ...] = ()
    min_active: Count = 0
    # Of every port; a port that `rates` names (`mlx5_0`, `mlx5_0:1`) is judged by that alone.
    min_rate_gbit_per_s: NotNegative = 0.0
    rates: dict[str, Rate] = msgspec.field(default_factory=dict)
    # Since the last run on this node.
    max_link_downed: Count = 0
    max_errors: Count = 100

    def collect(self, machine: CheckContext) -> InfiniBandSeen:
        """Read /sys/class/infiniband."""
        devices = machine.entries(_BASE)
        if not devices and not machine.path("/sys/class").is_dir():
            raise Unmeasured("/sys/class does not exist")
        ports = {
            f"{device}:{number}": _read_port(machine, f"{_BASE}/{device}/ports/{number}")
            for device in devices
            for number in machine.entries(f"{_BASE}/{device}/ports")
        }
        wanted = {_full(name) for name in self.ports} or set(ports)
        counters = {name: port.counters for name, port in ports.items() if name in wanted}
        key = ".".join(["infiniband", machine.context, *_in_a_name(self.ports)])
        before, age_s = exchange(machine, key, counters, dict[str, dict[str, int]])
        return InfiniBandSeen(ports=ports, before=before, age_s=age_s)

    def judge(self, seen: InfiniBandSeen) -> Finding:
        """A port that is missing, down or slow is a fault; errors are worth a look."""
        wanted = {_full(name) for name in self.ports} or set(seen.ports)
        active = {name for name, port in seen.ports.items() if _is_active(port)}
        parts = [self._port(name, seen) for name in sorted(wanted) if self.ports or name in active]
        if len(active) < self.min_active:
            text = f"{len(active)} of {len(seen.ports)} ports active, limit {self.min_active}"
            down = ", ".join(sorted(set(seen.ports) - active))
            parts.append(node_fault(f"{text}{f' (down: {down})' if down else ''}"))
        return joined(parts, well=f"{counted(len(active), 'port')} active")

    def _port(self, name: str, seen: InfiniBandSeen) -> Finding:
        port = seen.ports.get(name)
        if port is None:
            return node_fault(f"there is no port {name}")
        if not _is_active(port):
            return node_fault(f"{name} is {port.state}, {port.physical}")
        own = {_full(each): rate for each, rate in self.rates.items()}
        of_all = self.min_rate_gbit_per_s if self.ports or is_compared(name, seen.ports) else 0.0
        if limit := own.get(name, of_all):
            if port.rate_gbit_per_s is None:
                return inconclusive(f"{name} does not report its rate")
            if port.rate_gbit_per_s < limit:
                text = f"{name} runs at {port.rate_gbit_per_s:g} Gbit/s"
                return node_fault(f"{text}, limit {limit:g}")
        return self._counters(name, port, seen)

    def _counters(self, name: str, port: Port, seen: InfiniBandSeen) -> Finding:
        before = (seen.before or {}).get(name, {})
        grown = {
            counter: max(0, count - before[counter])
            for counter, count in port.counters.items()
            if counter in before
        }
        downed = grown.pop("link_downed", 0)
        if downed > self.max_link_downed:
            return warned(f"{name} lost its link {counted(downed, 'time')} in {seen.age_s:.0f} s")
        if sum(grown.values()) > self.max_errors:
            worst = max(grown, key=grown.__getitem__)
            return warned(f"{name}: {worst} grew by {grown[worst]} in {seen.age_s:.0f} s")
        return passed(name)


def is_compared(name: str, ports: Mapping[str, Port]) -> bool:
    """Tell whether a port belongs to those that jobs talk over, which share one limit.

    Where there is InfiniBand, an Ethernet port beside it has another use; and a bond of Ethernet
    ports (`mlx5_bond_0`) is one device with a rate of its own.
    """
    if not ports[name].is_ethernet:
        return True
    return "bond" not in name and all(each.is_ethernet for each in ports.values())


def _full(name: str) -> str:
    """Return a port's whole name: an adapter named alone means its first port."""
    return name if ":" in name else f"{name}:1"


def _in_a_name(ports: tuple[str, ...]) -> list[str]:
    """Return what stands for these ports in the name of a file, nothing for all ports."""
    names = sorted({_full(name) for name in ports})
    if not names or _SAFE_NAMES.fullmatch(".".join(names)):
        return names
    import hashlib  # it loads a large library, and few sites have such names

    return [hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]]


def _is_active(port: Port) -> bool:
    return port.state == "ACTIVE" and port.physical in {"LinkUp", ""}


def _read_port(machine: CheckContext, base: str) -> Port:
    rate = re.match(r"([\d.]+) Gb/sec", machine.read_or_none(f"{base}/rate") or "")
    counters = {}
    for name in _COUNTERS:
        text = machine.read_or_none(f"{base}/counters/{name}")
        if text and text.isdigit():
            counters[name] = int(text)
    return Port(
        state=_word(machine.read(f"{base}/state")),
        physical=_word(machine.read_or_none(f"{base}/phys_state") or ""),
        rate_gbit_per_s=float(rate.group(1)) if rate else None,
        is_ethernet=machine.read_or_none(f"{base}/link_layer") == "Ethernet",
        counters=counters,
    )


def _word(text: str) -> str:
    """Return the word of the kernel's `4: ACTIVE`."""
    return text.rpartition(":")[2].strip()


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
            times = f"{counted(flaps, 'time')} in {seen.age_s:.0f} s"
            text = f"{self.interface} lost or gained its link {times}"
            found.append(warned(text, carrier_changes=flaps))
        errors = _delta(seen.counters.errors, seen.before.errors)
        if seen.age_s > 0 and errors / seen.age_s > self.max_errors_per_s:
            text = f"{self.interface}: {counted(errors, 'error')} in {seen.age_s:.0f} s"
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
