# SPDX-License-Identifier: Apache-2.0
"""The InfiniBand and RoCE adapters of a node: which are in use, how fast, and near which device.

It is read from /sys, as NCCL does: only ports that are active and speak InfiniBand or Ethernet.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.preflight.probes.context import NotMeasured

SYS = Path("/sys")
_LINK_LAYERS = ("InfiniBand", "Ethernet")


@dataclass(frozen=True)
class Place:
    """Where something is plugged in: its path in the tree of buses, and its NUMA node if known."""

    path: str = ""
    numa: str = ""


@dataclass(frozen=True)
class Adapter:
    """One adapter, and the rates of its active ports in Gbit/s (0: not told)."""

    name: str
    rates_gbit_per_s: tuple[float, ...]
    place: Place


def present(sys: Path = SYS) -> list[str]:
    """Return the names of all adapters, in use or not."""
    infiniband = sys / "class/infiniband"
    return sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []


def active(sys: Path = SYS) -> list[Adapter]:
    """Return the adapters that have an active port."""
    found = []
    for name in present(sys):
        base = sys / "class/infiniband" / name
        ports = sorted((base / "ports").iterdir()) if (base / "ports").is_dir() else []
        rates = tuple(_rate_gbit_per_s(port) for port in ports if _is_active(port))
        if rates:
            found.append(Adapter(name, rates, _place(base / "device")))
    return found


def ports_gbit_per_s(environ: Mapping[str, str], sys: Path = SYS) -> list[float]:
    """Return the rates of the active ports that NCCL may use; none where it may use none."""
    with contextlib.suppress(NotMeasured):
        return [rate for each in used(environ, sys) for rate in each.rates_gbit_per_s]
    return []


def used(environ: Mapping[str, str], sys: Path = SYS) -> list[Adapter]:
    """Return the adapters that the job's NCCL uses, if any.

    Nodes that are played on one machine, each under a host id of its own, speak through none.

    Raises:
        NotMeasured: the environment names an adapter that is not there.
    """
    if "NCCL_HOSTID" in environ or environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    wanted = chosen_adapters(environ.get("NCCL_IB_HCA", ""), present(sys))
    return [each for each in active(sys) if each.name in wanted]


def chosen_adapters(wanted: str, present: list[str]) -> list[str]:
    """Return the adapters that NCCL would use, by its variable NCCL_IB_HCA.

    The variable lists beginnings of names; with `=` in front, whole names; with `^`, those not to
    use. A port may follow a name, behind a colon.

    Raises:
        NotMeasured: it names an adapter that this node does not have.
    """
    unwanted, rest = wanted.startswith("^"), wanted.lstrip("^")
    whole, names = rest.startswith("="), rest.lstrip("=")
    listed = [name.partition(":")[0] for name in names.split(",") if name]

    def fits(adapter: str, name: str) -> bool:
        return adapter == name if whole else adapter.startswith(name)

    missing = [name for name in listed if not any(fits(adapter, name) for adapter in present)]
    if missing and not unwanted:
        raise NotMeasured(
            f"NCCL_IB_HCA names {', '.join(missing)}, but this node has"
            f" {', '.join(present) or 'no InfiniBand or RoCE adapter'}"
        )
    if not listed:
        return present
    return [a for a in present if any(fits(a, name) for name in listed) is not unwanted]


def place_of_pci(address: str, sys: Path = SYS) -> Place:
    """Return where the PCI device of this address (0000:1a:00.0) is."""
    return _place(sys / "bus/pci/devices" / address)


def nearest_first(adapter: Place, devices: Sequence[Place]) -> list[int]:
    """Return the numbers of the devices, those first that are nearest to the adapter.

    Nearest is what shares most of the way through the tree of buses, then what is on the same NUMA
    node. What is equally near follows in pairs (0 and 1, 2 and 3), so that neighbours share a pair.
    """
    order = range(len(devices))

    def far(number: int) -> tuple[int, bool]:
        device = devices[number]
        return -_shared_steps(adapter, device), not device.numa or device.numa != adapter.numa

    if not order:
        return []
    first = min(order, key=far)
    return [first, *sorted(set(order) - {first}, key=lambda each: (far(each), each ^ first))]


def _shared_steps(first: Place, second: Place) -> int:
    ways = [[step for step in each.path.split("/") if ":" in step] for each in (first, second)]
    steps = zip(*ways)  # noqa: B905 - older Pythons run this
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], steps))


def _place(link: Path) -> Place:
    if not link.exists():
        return Place()
    numa = _read(link / "numa_node")
    return Place(str(link.resolve()), "" if numa.startswith("-") else numa)


def _is_active(port: Path) -> bool:
    return "ACTIVE" in _read(port / "state").split() and _read(port / "link_layer") in _LINK_LAYERS


def _rate_gbit_per_s(port: Path) -> float:
    found = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
    return float(found.group(1)) if found else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
