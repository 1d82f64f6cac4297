# SPDX-License-Identifier: Apache-2.0
"""`init-config`: a site's file drafted from this node as it is now.

Run it on a healthy node: what is there is taken for what should be there. Every
check that can drain begins in shadow.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.cpu_speed import sample_cpus
from slurm_health.node.checks.filesystem import read_mounts
from slurm_health.node.checks.memory import read_meminfo
from slurm_health.node.checks.tasks import Daemon, count_cpus
from slurm_health.records.errors import Unmeasured
from slurm_health.system.nvml import GpuDevice, read_gpus

_LOCAL_TYPES = frozenset({"ext4", "xfs", "btrfs", "zfs"})
_SHARED_TYPES = frozenset({"nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "wekafs"})
_DAEMONS = ("munged", "sshd", "chronyd", "nvidia-persistenced")
_KIB_PER_GIB = 1 << 20
# Firmware and crash kernels take a little; a missing module takes far more.
_MEMORY_SHARE = 0.97
# Of this node's speed; processors share caches, power and heat with what else runs.
_SPEED_SHARE = 0.6
_QUIET_SHARE = 0.9
_DCGMI = ("/usr/bin/dcgmi", "/usr/local/bin/dcgmi")
# Level 2 takes two minutes, and the host engine may have to load first. The epilog's shim, as it is
# shipped, leaves room for it.
_DCGM_LIMIT_S = 300
# What the system itself, and jobs, write to. A directory at the top that is none of the system's is
# the site's own: scratch and its like.
_WRITTEN = frozenset({"/", "/tmp", "/var", "/var/tmp"})  # noqa: S108 - names of mount points
_OF_THE_SYSTEM = frozenset(
    {"bin", "boot", "dev", "efi", "etc", "lib", "lib64", "media", "nix", "opt", "proc", "root"}
    | {"run", "sbin", "snap", "srv", "sys", "usr", "var"}
)
# A BMC with a few hundred sensors, and eight ports with modules, answer within half a minute.
_SLOW_LIMIT_S = 40
_IDLE = '# contexts = ["retest", "healthcheck"]'

_HEAD = """\
# slurm-health: the site's settings. Drafted from {node}.
# Root owns this file and nobody else may write it. What a key means: documentation, admin/checks.md
# What would run on a node, and why: slurm-health healthcheck --explain

# Where journals of jobs go, the same for every user and for the epilog. With ~, each user's home,
# root's fleet commands (lemons, metrics, history) find none.
journal = {journal}

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
"""


def draft(context: CheckContext, *, node: str, shared: str = "") -> tuple[str, list[str]]:
    """Return the text of a file for nodes like this one, and what it lacks and why."""
    left_out = []
    directory = f"directory = {_text(shared)}" if shared else '# directory = "/shared/slurm-health"'
    journal = _text(f"{shared.rstrip('/')}/journal" if shared else "~/.slurm-health/journal")
    sections = [_HEAD.format(node=node, directory=directory, journal=journal)]
    for title, build in _SECTIONS:
        try:
            table = build(context)
        except (Unmeasured, ValueError, KeyError) as err:
            left_out.append(f"{title}: left out: {err}")
            sections.append(f"\n# {left_out[-1]}\n")
        else:
            sections += [f"\n# {title}\n{table}"] if table else []
    return "".join(sections), left_out


def _total(title: str, key: str, context: CheckContext) -> str:
    total_gib = read_meminfo(context)[key] / _KIB_PER_GIB
    return _table(title, min_total_gib=round(total_gib * _MEMORY_SHARE, 1))


def _edac(context: CheckContext) -> str:
    has_controllers = any(
        name[2:].isdigit() for name in context.entries("/sys/devices/system/edac/mc")
    )
    return _table("edac") if has_controllers else ""


def _cpus(context: CheckContext) -> str:
    return _table("cpus", min_online=count_cpus(context.read("/sys/devices/system/cpu/online")))


def _cpu_speed(context: CheckContext) -> str:
    sample = sample_cpus(context)
    if sample.share < _QUIET_SHARE:
        raise Unmeasured("the node is busy; run init-config again while nothing else runs")
    limit = round(sample.rounds_per_s * _SPEED_SHARE, -4)
    return _table("cpu-speed", min_rounds_per_s=int(limit))


def _clocksource(context: CheckContext) -> str:
    base = "/sys/devices/system/clocksource/clocksource0"
    return _table("clocksource", allowed=[context.read(f"{base}/current_clocksource").strip()])


def _filesystems(context: CheckContext) -> str:
    tables: list[str] = []
    names: Counter[str] = Counter()
    for point, (kind, options) in sorted(read_mounts(context).items()):
        if kind not in _LOCAL_TYPES | _SHARED_TYPES or context.path(point).is_file():
            continue
        writable = "ro" not in options.split(",") and kind in _LOCAL_TYPES and _is_written(point)
        name = "filesystem-" + (re.sub(r"[^A-Za-z0-9_-]", "-", point.strip("/")) or "root")
        names[name] += 1  # `/a/b` and `/a-b`
        tables.append(
            _table(
                f"{name}-{names[name]}" if names[name] > 1 else name,
                check="filesystem",
                path=point,
                fstype=kind,
                writable=writable,
                min_available_percent=2,
                min_free_inodes_percent=2,
            )
        )
    return "\n".join(tables)


def _is_written(point: str) -> bool:
    """Tell whether it matters that a mount can be written: a file is, before every job."""
    return point in _WRITTEN or point.split("/")[1] not in _OF_THE_SYSTEM


def _ethernet(context: CheckContext) -> str:
    tables = []
    for name in context.entries("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        is_device = context.path(f"{base}/device").exists()
        if not is_device or context.read_or_none(f"{base}/operstate") != "up":
            continue
        speed = context.read_or_none(f"{base}/speed") or ""
        limit = int(speed) if speed.isdigit() else 0  # a driver that does not know says -1
        title = f"ethernet-{name}"
        tables.append(_table(title, check="ethernet", interface=name, min_speed_mbit=limit))
    return "\n".join(tables)


def _infiniband(context: CheckContext) -> str:
    from slurm_health.node.checks.network import is_compared, read_ports

    ports = read_ports(context)
    active = {
        name: port
        for name, port in ports.items()
        if port.state == "ACTIVE" and is_compared(name, ports)
    }
    if not active:
        return ""
    # Adapters of storage are often slower than those of the GPUs.
    rates = {name: active[name].rate_gbit_per_s for name in sorted(active)}
    told = {name: rate for name, rate in rates.items() if rate}
    return _table("infiniband", ports=list(rates), rates=told)


def _daemons(context: CheckContext) -> str:
    wanted = [name for name in _DAEMONS if Daemon(name=name).count(context)]
    return "\n".join(_table(f"daemon-{name}", check="daemon", name=name) for name in wanted)


def _gpus(context: CheckContext) -> str:
    count = len(context.entries("/proc/driver/nvidia/gpus"))
    if not count:
        return ""
    try:
        links = nvlinks_of_each(read_gpus().devices)
    except Unmeasured:  # such as without the extra gpu
        links = None
    gpu = _table("gpu", count=count, nvlinks=links) if links else _table("gpu", count=count)
    return "\n".join([gpu, _table("gpu-processes"), _table("xid")])


def nvlinks_of_each(devices: Sequence[GpuDevice]) -> int | None:
    """Return how many NVLinks are active on every GPU, None where they differ or have none.

    Where they differ, a link may be down, and what is down is no limit to draft.
    """
    seen = {device.links_active for device in devices}
    return seen.pop() or None if len(seen) == 1 else None


def _dcgm(context: CheckContext) -> str:
    if not any(context.path(path).exists() for path in _DCGMI):
        return ""
    text = _table("dcgm", level=2, time_limit_s=_DCGM_LIMIT_S)
    return (
        f"{text}# Before jobs too, if HealthCheckNodeState=IDLE keeps it off busy nodes:\n{_IDLE}\n"
    )


def _amd_gpus(context: CheckContext) -> str:
    from slurm_health.node.checks.external import is_there, run_program
    from slurm_health.node.checks.rows import records_of
    from slurm_health.node.checks.vendors import amd_gpus

    if not context.entries("/sys/bus/pci/drivers/amdgpu") or not is_there("amd-smi", context):
        return ""
    metrics = records_of(run_program(["amd-smi", "metric", "--json"], context).output)
    return _table("amd-gpu", count=len(amd_gpus(metrics)), time_limit_s=_SLOW_LIMIT_S)


def _nvme(context: CheckContext) -> str:
    from slurm_health.node.checks.external import is_there
    from slurm_health.node.checks.vendors import local_drives

    drives = local_drives(context)
    has_tool = is_there("smartctl", context) or is_there("nvme", context)
    return _table("nvme", count=len(drives)) if drives and has_tool else ""


def _bmc(context: CheckContext) -> str:
    from slurm_health.node.checks.external import is_there

    has_driver = any(context.path(f"/dev/{name}").exists() for name in ("ipmi0", "ipmi/0"))
    if not has_driver or not is_there("ipmitool", context):
        return ""
    return _table("bmc", time_limit_s=_SLOW_LIMIT_S)


def _optics(context: CheckContext) -> str:
    """Return the ports whose modules answer now: many have a cable of copper that says nothing."""
    from slurm_health.node.checks.external import is_there
    from slurm_health.node.checks.network import read_ports
    from slurm_health.node.checks.vendors import Optics

    interfaces = [
        name
        for name in context.entries("/sys/class/net")
        if context.path(f"/sys/class/net/{name}/device").exists()
        and context.read_or_none(f"/sys/class/net/{name}/operstate") == "up"
    ]
    ports = read_ports(context) if is_there("mlxlink", context) else {}
    devices = [name.partition(":")[0] for name, each in ports.items() if each.state == "ACTIVE"]
    if not (devices or (interfaces and is_there("ethtool", context))):
        return ""
    answering: dict[str, list[str]] = {}
    for key, names in (("interfaces", interfaces), ("devices", devices)):
        for name in names:
            with contextlib.suppress(Unmeasured):
                list(
                    Optics(interfaces=tuple(interfaces), devices=tuple(devices)).port(name, context)
                )
                answering.setdefault(key, []).append(name)
    if not answering:
        return ""
    return _table("optics", **dict[str, Any](answering, time_limit_s=_SLOW_LIMIT_S))


_SECTIONS: tuple[tuple[str, Callable[[CheckContext], str]], ...] = (
    ("Memory", partial(_total, "memory", "MemTotal")),
    ("Swap", partial(_total, "swap", "SwapTotal")),
    ("Memory errors", _edac),
    ("Processors", _cpus),
    ("cpu-speed, tested when a user's job calls the node slow or faulty", _cpu_speed),
    ("Clock", _clocksource),
    ("Filesystems", _filesystems),
    ("Ethernet", _ethernet),
    ("InfiniBand and RoCE", _infiniband),
    ("Daemons", _daemons),
    ("GPUs", _gpus),
    ("dcgmi diag, run when a job calls the node slow or faulty and no other job is on it", _dcgm),
    ("AMD GPUs", _amd_gpus),
    ("NVMe drives", _nvme),
    ("The board's controller: fans, power supplies, memory events", _bmc),
    ("Cables and optics", _optics),
    ("The kernel's log", lambda _place: _table("kernel-log")),
    ("What a job left behind when it ended", lambda _place: _table("leftovers", shadow=False)),
)


def _table(title: str, /, *, shadow: bool = True, **keys: object) -> str:
    lines = [f"[checks.{title}]"]
    lines += [f"{key} = {_text(value)}" for key, value in keys.items()]
    if shadow:
        lines.append("shadow = true")
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    """Return a value as TOML, which agrees with JSON on what is written here but tables."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_text(key)} = {_text(each)}' for key, each in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
