# SPDX-License-Identifier: Apache-2.0
"""A worker's machine: its processors and their memory, and the ways that the job's data takes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_health.preflight.probes.context import NotMeasured

_NODES = Path("/sys/devices/system/node")
# Variables that name the interfaces a collective library uses. NCCL's may be a pattern of its own
# (^docker, =eth0, eth): only plain names can be looked up.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LINK_LAYERS = ("InfiniBand", "Ethernet")


def model(threads: int) -> str:
    """Return what nodes must share to be compared: the processors' model, and how many are used."""
    line = re.search(r"^model name\s*:\s*(.*)$", read(Path("/proc/cpuinfo")), re.MULTILINE)
    name = line.group(1) if line else "cpu"
    return f"{name} with {threads} thread{'s' if threads != 1 else ''}"


def memory_bytes() -> tuple[int, int]:
    """Return the free and the total memory of this machine; 0 where it cannot be told."""
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes
    except (OSError, ValueError):
        return 0, 0


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """Return the memory nodes of which this process may use processors, with these processors.

    One node with all of them where the kernel tells of none.
    """
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for place in root.glob("node[0-9]*"):
        processors: set[int] = set()
        for part in filter(None, read(place / "cpulist").split(",")):  # 0-3,8-11
            first, _, last = part.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
        if processors & allowed:
            nodes[int(place.name[len("node") :])] = processors & allowed
    return dict(sorted(nodes.items())) or {0: allowed}


@contextlib.contextmanager
def only_on(processors: set[int]) -> Iterator[None]:
    """Have this thread run on these processors, where it first touches memory that is theirs."""
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # taken from the job meanwhile
            os.sched_setaffinity(0, processors)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def require_interfaces(environ: Mapping[str, str]) -> None:
    """Make sure that the interfaces which the environment names exist.

    Raises:
        NotMeasured: one does not.
    """
    present = sorted({name for _, name in socket.if_nameindex()})
    for variable in _INTERFACE_VARIABLES:
        names = [name for name in environ.get(variable, "").split(",") if name]
        if any(not name[0].isalnum() for name in names):
            continue
        exact = variable.startswith("GLOO")
        for name in names:
            if not any(other == name if exact else other.startswith(name) for other in present):
                raise NotMeasured(
                    f"{variable} names the interface {name}, but this node has {', '.join(present)}"
                )


def ports_gbit_per_s(environ: Mapping[str, str], sys: Path = Path("/sys")) -> list[float]:
    """Return the rates of the InfiniBand and RoCE ports that the job's NCCL may use (0: unknown).

    It is read from /sys, as NCCL does: ports that are active and speak InfiniBand or Ethernet.
    NCCL_IB_HCA lists beginnings of names; with `=` in front, whole names; with `^`, those not to
    use. A port may follow a name, behind a colon. None where one that it names is not there. Nodes
    that are played on one machine, each under a host id of its own, speak through none.
    """
    infiniband = sys / "class/infiniband"
    if "NCCL_HOSTID" in environ or environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    present = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    wanted = environ.get("NCCL_IB_HCA", "")
    unwanted, whole = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = [name.partition(":")[0] for name in wanted.lstrip("^").lstrip("=").split(",") if name]

    def fits(adapter: str, name: str) -> bool:
        return adapter == name if whole else adapter.startswith(name)

    if not unwanted and any(not any(fits(a, name) for a in present) for name in names):
        return []
    chosen = [
        adapter
        for adapter in present
        if not names or any(fits(adapter, name) for name in names) is not unwanted
    ]
    rates = []
    for port in (
        p for adapter in chosen for p in sorted((infiniband / adapter / "ports").glob("*"))
    ):
        if "ACTIVE" in read(port / "state").split() and read(port / "link_layer") in _LINK_LAYERS:
            rate = re.match(r"([\d.]+) Gb/sec", read(port / "rate"))
            rates.append(float(rate.group(1)) if rate else 0.0)
    return rates


def read(path: Path) -> str:
    """Return the text of a file of the kernel's, empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
