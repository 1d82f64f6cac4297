# SPDX-License-Identifier: Apache-2.0
"""The network ports of a node.

InfiniBand and RoCE ports: present, active, at full rate, without new errors. An Ethernet interface:
up, fast enough, without new errors. A link that flaps is a fault, one that was lost a warning.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import (
    HISTORY_S,
    Check,
    CheckContext,
    Count,
    NotNegative,
)
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

_BASE = "/sys/class/infiniband"
# Counters of the port, by the names of the kernel's sysfs interface.
_COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors", "local_link_integrity_errors")
_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors")
_WITHIN = f"within {HISTORY_S / 3600:g} h"

Counters = dict[str, int]


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port as the kernel shows it."""

    state: str
    physical: str
    rate_gbit_per_s: float | None
    is_ethernet: bool = False
    counters: Counters

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == "ACTIVE" and self.physical in {"LinkUp", ""}


def read_ports(machine: CheckContext) -> dict[str, Port]:
    """Return the ports in /sys/class/infiniband, by `device:port`.

    Raises:
        Unmeasured: there is no /sys, or a port cannot be read.
    """
    devices = machine.entries(_BASE)
    if not devices and not machine.path("/sys/class").is_dir():
        raise Unmeasured("/sys/class does not exist")
    ports = {}
    for device in devices:
        for number in machine.entries(f"{_BASE}/{device}/ports"):
            base = f"{_BASE}/{device}/ports/{number}"
            # The kernel writes `4: ACTIVE`.
            state = machine.read(f"{base}/state").rpartition(":")[2].strip()
            physical = (machine.read_or_none(f"{base}/phys_state") or "").rpartition(":")[2].strip()
            rate = re.match(r"([\d.]+) Gb/sec", machine.read_or_none(f"{base}/rate") or "")
            counts = {name: machine.number(f"{base}/counters/{name}") for name in _COUNTERS}
            ports[f"{device}:{number}"] = Port(
                state=state,
                physical=physical,
                rate_gbit_per_s=float(rate[1]) if rate else None,
                is_ethernet=machine.read_or_none(f"{base}/link_layer") == "Ethernet",
                counters={name: count for name, count in counts.items() if count is not None},
            )
    return ports


class InfiniBand(Check, frozen=True, kw_only=True):
    """InfiniBand and RoCE ports.

    In the ten minutes after a boot, one that is down is a warning.
    """

    TOGETHER = True
    COMPONENTS = ("node", "network", "nic")

    # `mlx5_0` or `mlx5_0:1`; each must be active. For ports of another rate, write a second table.
    ports: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    # Less is a node fault.
    min_rate_gbit_per_s: NotNegative = 0.0
    # Lost links within six hours; more is a node fault, any since the last run a warning.
    max_link_downed: Count = 10
    # Since the last run on this node; more is a warning.
    max_errors: Count = 100

    def measure(self, machine: CheckContext) -> Finding:
        """A port that is missing, down, slow or flaps is a fault; errors are a warning."""
        ports = read_ports(machine)
        wanted = sorted({_full(name) for name in self.ports})
        counters = {name: ports[name].counters for name in wanted if name in ports}
        key = f"infiniband.{machine.context}.{zlib.crc32(' '.join(wanted).encode()):08x}"
        history = machine.history(key, counters, dict[str, Counters])
        down = node_fault if machine.is_settled() else warned
        limit, parts = self.min_rate_gbit_per_s, []
        for name in wanted:
            port = ports.get(name)
            if port is None:
                parts.append(node_fault(f"there is no port {name}"))
                continue
            if not port.is_active:
                parts.append(down(f"{name} is {port.state}, {port.physical}"))
                continue
            rate = port.rate_gbit_per_s
            if limit and rate is None:
                parts.append(inconclusive(f"{name} does not report its rate"))
            elif rate is not None and rate < limit:
                parts.append(node_fault(f"{name} runs at {rate:g} Gbit/s, limit {limit:g}"))
            earlier = [(age_s, values.get(name, {})) for age_s, values in history]
            parts += self._counters(name, port, earlier)
        return joined(parts, well=f"{counted(len(wanted), 'port')} active")

    def _counters(
        self, name: str, port: Port, earlier: list[tuple[float, Counters]]
    ) -> Iterator[Finding]:
        if not earlier:
            return
        lost = _growth(port.counters, earlier[0][1]).get("link_downed", 0)
        grown = _growth(port.counters, earlier[-1][1])
        recent = grown.pop("link_downed", 0)
        yield from _flaps(f"{name} lost its link", lost, recent, self.max_link_downed)
        if sum(grown.values()) > self.max_errors:
            worst = max(grown, key=grown.__getitem__)
            yield warned(f"{name}: {worst} grew by {grown[worst]} since the last check")


def _flaps(what: str, count: int, recent: int, limit: int) -> Iterator[Finding]:
    """Yield the finding of a link that was lost so often within hours, and since the last check."""
    if count > limit:
        yield node_fault(f"{what} {count} times {_WITHIN}, limit {limit}", link_changes=count)
    elif recent:
        text = f"{what} {counted(recent, 'time')} since the last check"
        yield warned(text, link_changes=recent)


def _growth(now: Counters, before: Counters) -> Counters:
    return {name: max(0, count - before[name]) for name, count in now.items() if name in before}


def _full(name: str) -> str:
    """Return a port's whole name: an adapter named alone means its first port."""
    return name if ":" in name else f"{name}:1"


class Ethernet(Check, frozen=True, kw_only=True):
    """One interface. In the ten minutes after a boot, one that is down is a warning."""

    TOGETHER = True
    COMPONENTS = ("node", "network", "nic")

    # Its name.
    interface: Annotated[str, msgspec.Meta(pattern=r"^[^/\s]{1,15}$")]
    # Less is a node fault.
    min_speed_mbit: NotNegative = 0.0
    # Links lost and gained within six hours; more is a node fault, any since the last run a
    # warning.
    max_carrier_changes: Count = 20
    # Since the last run on this node; more is a warning.
    max_errors_per_s: NotNegative = 1.0

    def measure(self, machine: CheckContext) -> Finding:
        """Down, slow or flapping is a fault; errors are a warning."""
        base, name = f"/sys/class/net/{self.interface}", self.interface
        if not machine.path(base).exists() and machine.entries("/sys/class/net"):
            return node_fault(f"there is no interface {name}")
        state = machine.read(f"{base}/operstate").strip()
        errors = [machine.number(f"{base}/statistics/{error}") for error in _ERRORS]
        changes = machine.number(f"{base}/carrier_changes")
        counters = {} if changes is None else {"changes": changes}
        counters |= {"errors": sum(filter(None, errors))}
        key = f"ethernet.{machine.context}.{name}"
        history = machine.history(key, counters, Counters)
        # Bridges, loopback and virtual interfaces report "unknown" while they work.
        if state not in {"up", "unknown"}:
            return (node_fault if machine.is_settled() else warned)(f"{name} is {state}")
        parts = []
        speed = machine.number(f"{base}/speed")
        if self.min_speed_mbit and speed is not None and 0 < speed < self.min_speed_mbit:
            text = f"{name} runs at {speed} Mbit/s, limit {self.min_speed_mbit:g}"
            parts.append(node_fault(text, speed_mbit=speed))
        if history:
            age_s, last = history[-1]
            of_all = _growth(counters, history[0][1]).get("changes", 0)
            grown = _growth(counters, last)
            recent, new_errors = grown.get("changes", 0), grown.get("errors", 0)
            what = f"{name} lost or gained its link"
            parts += _flaps(what, of_all, recent, self.max_carrier_changes)
            if age_s > 0 and new_errors / age_s > self.max_errors_per_s:
                text = f"{name}: {counted(new_errors, 'error')} since the last check"
                parts.append(warned(text, errors=new_errors))
        return joined(parts, well=f"{name} is up")
