# SPDX-License-Identifier: Apache-2.0
"""`init config`: a config file drafted from this node as it is now.

It is for a healthy node: its present state becomes the expected one. Every check that can drain
begins in shadow.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.clock import read_clock_source
from slurm_health.node.checks.cpu_speed import sample_cpus
from slurm_health.node.checks.external import is_there, run_program
from slurm_health.node.checks.filesystem import read_mounts
from slurm_health.node.checks.memory import read_meminfo
from slurm_health.node.checks.network import read_ports
from slurm_health.node.checks.rows import records_of
from slurm_health.node.checks.tasks import Daemon, count_cpus
from slurm_health.node.checks.vendors import amd_gpus, local_drives
from slurm_health.records.errors import Unmeasured
from slurm_health.system.nvml import GpuDevice, read_gpus
from slurm_health.system.proc import mounts_in

_LOCAL_TYPES = frozenset({"ext4", "xfs", "btrfs", "zfs"})
_DAEMONS = ("munged", "sshd", "chronyd", "nvidia-persistenced")
_KIB_PER_GIB = 1 << 20
# Firmware and crash kernels take a little; a missing module takes far more.
_MEMORY_SHARE = 0.97
# Of this node's speed; processors share caches, power and heat with other work.
_SPEED_SHARE = 0.6
_QUIET_SHARE = 0.9
# Level 2 takes two minutes, and the host engine may have to load first. The epilog's shim, as it is
# shipped, leaves room for it.
_DCGM_LIMIT_S = 300
# A BMC with a few hundred sensors answers within half a minute.
_SLOW_LIMIT_S = 40
# Mount points that the system and jobs write to. A directory at the top that is none of the
# system's is the site's own, such as scratch.
_WRITTEN = frozenset({"/", "/tmp", "/var", "/var/tmp"})  # noqa: S108 - names of mount points
_OF_THE_SYSTEM = frozenset(
    {"bin", "boot", "dev", "efi", "etc", "lib", "lib64", "media", "nix", "opt", "proc", "root"}
    | {"run", "sbin", "snap", "srv", "sys", "usr", "var"}
)
# The name of a table, and its keys.
Table = tuple[str, dict[str, Any]]
_HEAD = """\
# slurm-health: the site's settings. Drafted from {node}.
# Root owns this file and nobody else may write to it. Keys: documentation, reference/checks.md
# What would run on a node, and why: slurm-health healthcheck --explain

# The directory of jobs' journals, the same for every user and for the epilog. With ~, the user's
# home, root's fleet commands (lemons, metrics, history) have no journals to read.
journal = {journal}

# Directories whose storage every check tests, on all nodes at once.
paths = {paths}

[hooks]
# Nothing is drained until this is true.
drain = false

[breaker]
# On a filesystem that all nodes share and where only root may write. Without it, nothing is
# drained.
{directory}
share = 0.1

[accusations]
policy = "confirm"

# With a user without rights, whose journals the nodes share, accused nodes are checked with
# partners:
# [sweep]
# user = "health"
"""


def draft(context: CheckContext, *, node: str, shared: str = "") -> tuple[str, list[str]]:
    """Return the text of a file for nodes like this one, and the sections left out, with why."""
    left_out = []
    directory = f"directory = {_text(shared)}" if shared else '# directory = "/shared/slurm-health"'
    journal = _text(f"{shared.rstrip('/')}/journal" if shared else "~/.slurm-health/journal")
    mounts = mounts_in(context.read_or_none("/proc/self/mounts") or "").items()
    served = sorted(p for p, m in mounts if m.has_server and p.split("/")[1] not in _OF_THE_SYSTEM)
    sections = [_HEAD.format(node=node, directory=directory, journal=journal, paths=_text(served))]
    for title, build in _SECTIONS.items():
        try:
            tables = list(build(context))
        except (Unmeasured, ValueError, KeyError) as err:
            left_out.append(f"{title}: left out: {err}")
            sections.append(f"\n# {left_out[-1]}\n")
            continue
        texts = []
        for name, keys in tables:
            shadow = {} if name == "leftovers" else {"shadow": True}
            lines = [f"{key} = {_text(value)}" for key, value in {**keys, **shadow}.items()]
            texts.append("\n".join([f"[checks.{name}]", *lines]) + "\n")
        sections += ["\n# ", title, "\n", "\n".join(texts)] if texts else []
    return "".join(sections), left_out


def _text(value: object) -> str:
    """Return a value as TOML, which is JSON for every value written here but tables."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_text(key)} = {_text(item)}' for key, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def _memory(context: CheckContext) -> Iterator[Table]:
    fields = read_meminfo(context)
    for name, field in (("memory", "MemTotal"), ("swap", "SwapTotal")):
        least_gib = round(fields[field] / _KIB_PER_GIB * _MEMORY_SHARE, 1)
        yield name, {"min_total_gib": least_gib}
    if any(name[2:].isdigit() for name in context.entries("/sys/devices/system/edac/mc")):
        yield "edac", {}


def _cpu_speed(context: CheckContext) -> Iterator[Table]:
    sample = sample_cpus(context)
    if sample.share < _QUIET_SHARE:
        raise Unmeasured("the node is busy; run init config again while nothing else runs")
    limit = round(sample.rounds_per_s * _SPEED_SHARE, -4)
    yield "cpu-speed", {"min_rounds_per_s": int(limit)}


def _filesystems(context: CheckContext) -> Iterator[Table]:
    names: set[str] = set()
    for point, mount in sorted(read_mounts(context).items()):
        kind, options, _ = mount
        is_known = kind in _LOCAL_TYPES or (mount.has_server and not kind.startswith("fuse."))
        if not is_known or context.path(point).is_file():
            continue
        # A writable mount is tested before every job, by a file.
        is_used = point in _WRITTEN or point.split("/")[1] not in _OF_THE_SYSTEM
        name = "filesystem-" + (re.sub(r"[^A-Za-z0-9_-]", "-", point.strip("/")) or "root")
        while name in names:  # `/a/b` and `/a-b`
            name += "-2"
        names.add(name)
        yield (
            name,
            {
                "check": "filesystem",
                "path": point,
                "fstype": kind,
                "writable": "ro" not in options.split(",") and kind in _LOCAL_TYPES and is_used,
                "min_available_percent": 2,
                "min_free_inodes_percent": 2,
            },
        )


def _interfaces(context: CheckContext) -> list[str]:
    """Return the interfaces of adapters that are up."""
    base = "/sys/class/net"
    return [
        name
        for name in context.entries(base)
        if context.path(f"{base}/{name}/device").exists()
        and context.read_or_none(f"{base}/{name}/operstate") == "up"
    ]


def _network(context: CheckContext) -> Iterator[Table]:
    for name in _interfaces(context):
        # A driver that does not know its speed shows -1.
        speed = max(0, context.number(f"/sys/class/net/{name}/speed") or 0)
        keys = {"check": "ethernet", "interface": name, "min_speed_mbit": speed}
        yield f"ethernet-{name}", keys
    ports = read_ports(context)
    # Adapters of storage are often slower than those of the GPUs. Where there is InfiniBand, an
    # Ethernet port beside it has another use, and a bond of Ethernet ports is a device of its own.
    has_infiniband = any(not port.is_ethernet for port in ports.values())
    by_rate: dict[float, list[str]] = {}
    for name, port in sorted(ports.items()):
        is_used = not port.is_ethernet or not (has_infiniband or "bond" in name)
        if port.state == "ACTIVE" and is_used:
            by_rate.setdefault(port.rate_gbit_per_s or 0.0, []).append(name)
    for number, (rate, names) in enumerate(sorted(by_rate.items(), reverse=True)):
        keys = {"ports": names, "min_rate_gbit_per_s": rate}
        if number:
            yield f"infiniband-{rate:g}", {"check": "infiniband", **keys}
        else:
            yield "infiniband", keys


def _gpus(context: CheckContext) -> Iterator[Table]:
    count = len(context.entries("/proc/driver/nvidia/gpus"))
    if not count:
        return
    links = None
    with contextlib.suppress(Unmeasured):  # such as without the extra gpu
        links = common_nvlinks(read_gpus().devices)
    yield "gpu", {"count": count, **({"nvlinks": links} if links else {})}
    yield "gpu-processes", {}
    yield "xid", {}


def common_nvlinks(devices: Sequence[GpuDevice]) -> int | None:
    """Return how many NVLinks are active on every GPU, None if they differ or have none.

    If they differ, a link may be down, and the number is no limit to draft.
    """
    counts = {device.links_active for device in devices}
    return counts.pop() or None if len(counts) == 1 else None


def _vendors(context: CheckContext) -> Iterator[Table]:
    if is_there("dcgmi", context):
        yield "dcgm", {"level": 2, "time_limit_s": _DCGM_LIMIT_S}
    if context.entries("/sys/bus/pci/drivers/amdgpu") and is_there("amd-smi", context):
        metrics = records_of(run_program(["amd-smi", "metric", "--json"], context).output)
        yield "amd-gpu", {"count": len(amd_gpus(metrics)), "time_limit_s": _SLOW_LIMIT_S}
    drives = local_drives(context)
    if drives and is_there("nvme", context):
        yield "nvme", {"count": len(drives)}
    has_driver = any(context.path(f"/dev/{name}").exists() for name in ("ipmi0", "ipmi/0"))
    if has_driver and is_there("ipmitool", context):
        yield "bmc", {"time_limit_s": _SLOW_LIMIT_S}


_SECTIONS: dict[str, Callable[[CheckContext], Iterator[Table]]] = {
    "Memory": _memory,
    "Processors": lambda place: iter(
        [("cpus", {"min_online": count_cpus(place.read("/sys/devices/system/cpu/online"))})]
    ),
    "cpu-speed, tested when a user's job calls the node slow or faulty": _cpu_speed,
    "Clock": lambda place: iter([("clocksource", {"allowed": [read_clock_source(place)]})]),
    "Filesystems": _filesystems,
    "Ethernet, InfiniBand and RoCE": _network,
    "Daemons": lambda place: (
        (f"daemon-{name}", {"check": "daemon", "name": name})
        for name in _DAEMONS
        if Daemon(name=name).count(place)
    ),
    "GPUs": _gpus,
    "Vendors' tools; dcgm runs when a job accuses the node, while no other job is on it": _vendors,
    "Jobs whose watch has died": lambda _: iter([("watches", {})]),
    "The kernel's log": lambda _place: iter([("kernel-log", {})]),
    "Leftovers of a job": lambda _place: iter([("leftovers", {})]),
}
