# SPDX-License-Identifier: Apache-2.0
"""The InfiniBand and RoCE adapters of a node: which the job's NCCL may use, and how fast they are.

It is read from /sys, as NCCL does: only ports that are active and speak InfiniBand or Ethernet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_LINK_LAYERS = ("InfiniBand", "Ethernet")


def ports_gbit_per_s(environ: Mapping[str, str], sys: Path = Path("/sys")) -> list[float]:
    """Return the rates of the active ports that the job's NCCL may use (0: not known).

    Nodes that are played on one machine, each under a host id of its own, speak through none.
    """
    infiniband = sys / "class/infiniband"
    if "NCCL_HOSTID" in environ or environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return []
    present = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    return [
        _rate_gbit_per_s(port)
        for name in _chosen(environ.get("NCCL_IB_HCA", ""), present)
        for port in sorted((infiniband / name / "ports").glob("*"))
        if _is_active(port)
    ]


def _chosen(wanted: str, present: list[str]) -> list[str]:
    """Return the adapters that NCCL would use, by its variable NCCL_IB_HCA.

    The variable lists beginnings of names; with `=` in front, whole names; with `^`, those not to
    use. A port may follow a name, behind a colon. None where one that it names is not there.
    """
    unwanted, rest = wanted.startswith("^"), wanted.lstrip("^")
    whole, names = rest.startswith("="), rest.lstrip("=")
    listed = [name.partition(":")[0] for name in names.split(",") if name]

    def fits(adapter: str, name: str) -> bool:
        return adapter == name if whole else adapter.startswith(name)

    missing = [name for name in listed if not any(fits(adapter, name) for adapter in present)]
    if missing and not unwanted:
        return []
    if not listed:
        return present
    return [a for a in present if any(fits(a, name) for name in listed) is not unwanted]


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
