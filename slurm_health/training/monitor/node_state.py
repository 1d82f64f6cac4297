# SPDX-License-Identifier: Apache-2.0
"""The state of one node of a job, read by its agent or the batch host as the job's user.

Every part is read in a child of its own, so that a GPU or a filesystem that hangs costs only its
own line. Nothing is changed, and no file is read that the job's user cannot read.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.gpu import Gpu
from slurm_health.node.checks.kernel_log import read_messages
from slurm_health.node.checks.network import read_ports
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    FAULTS,
    HUNG_TASK,
    LOST,
    OUT_OF_MEMORY,
    WARNINGS,
    XID,
    lost_gpu_named,
    of_line,
    of_xid,
)
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import cut, one_line, whole_number
from slurm_health.system import killable
from slurm_health.system.nvml import Gpus, read_gpus
from slurm_health.system.proc import mount_of, mounted
from slurm_health.training.diagnosis.collected import NodeState, ScriptEnd
from slurm_health.training.diagnosis.collectives import FlightRecord
from slurm_health.training.diagnosis.samples import NodeReport, RankSample
from slurm_health.training.framework import NothingCollected
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.messages import lines_of
from slurm_health.training.monitor.ranks import SCRIPT, Ranks, located

LIMIT_S = 4.0  # of all parts, which are read at once
# Lines for the operators, and more for a reader.
_MESSAGES = "|".join(
    dict.fromkeys(
        f"(?:{re.sub(r'[?]P<[a-z]+>', '', pattern)})"
        for pattern in (ANY_XID, OUT_OF_MEMORY, HUNG_TASK, *FAULTS, *WARNINGS)
    )
)
_MOST_READ, _MOST_MESSAGES = 400, 40  # the first with those of GPUs that belong to other jobs
_CLOCKS_S = 1.0  # the difference between clocks of nodes
_MOST_LINES = 20
_LINE_CHARACTERS = 300
_ROOTS = {"v1": "sys/fs/cgroup/memory", "v2": "sys/fs/cgroup"}
_V1_EVENTS = "memory.oom_control"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is written there
_LOW_SHARE = 0.01  # of memory, of a filesystem or of its files: less is next to none
_UP = 0x1  # IFF_UP: the interface is configured to work
# Recovery actions of NVML, before which no program can use a GPU (nvml.h,
# nvmlGpuRecoveryAction_t).
_RESET, _REBOOT = 1, 2


class _Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """NVML's report, and the PCI addresses of all GPUs that are visible to the job here."""

    buses: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


class _Kills(msgspec.Struct, frozen=True, kw_only=True):
    kills: int
    limit_bytes: int | None = None


def node_state(
    job: str,
    node: str,
    began_s: float,
    directory: Path,
    ranks: Ranks | None = None,
    *,
    with_dumps: bool = False,
) -> NodeState:
    """Return the state of this node.

    Args:
        job: the number of the job.
        node: the name of this node.
        began_s: when the script began, in seconds since the epoch.
        directory: in which it was started.
        ranks: those of a script that has ended; of one that runs the watch inspects them.
        with_dumps: whether to read Flight Recorder dumps on filesystems of this node.
    """
    root = Path("/")
    looks: dict[str, tuple[Callable[[], object], type]] = {
        "kernel log": (lambda: kernel_lines(root, time.time() - began_s), tuple[str, ...]),
        "memory kills": (lambda: memory_kills(root, job), _Kills),
        "memory": (lambda: _memory(root), tuple[str, ...]),
        "disk": (lambda: _disks(directory), tuple[str, ...]),
        "links": (lambda: links(root), tuple[str, ...]),
        "gpus": (lambda: judged(read_gpus()), _Gpus),
    }
    if ranks is not None:
        looks["ranks"] = (lambda: _left(ranks), tuple[str, ...])
    if with_dumps:
        looks["dumps"] = (lambda: _dumps(node, began_s, directory), tuple[FlightRecord, ...])

    def encoded(name: str) -> bytes:
        return msgspec.json.encode(looks[name][0]())

    works: dict[str, tuple[killable.Work, float]] = {
        name: (partial(encoded, name), LIMIT_S) for name in looks
    }
    answered: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    for name, answer in killable.run_all(works).items():
        match answer:
            case killable.Answered(data=data):
                answered[name] = from_json(data, looks[name][1])
            case killable.Broke(reason=reason):
                unavailable[name] = cut(one_line(reason), _LINE_CHARACTERS)
            case killable.Hung(limit_s=limit_s):
                unavailable[name] = f"no answer within {limit_s:g} s"
    kills: _Kills = answered.get("memory kills", _Kills(kills=0))
    gpus: _Gpus = answered.get("gpus", _Gpus())
    count = whole_number(os.environ.get("SLURM_GPUS_ON_NODE", ""))
    kernel = of_the_job(answered.get("kernel log", ()), gpus.buses, count)
    others = (line for key in ("memory", "disk", "links") for line in answered.get(key, ()))
    return NodeState(
        node=node,
        kernel=most_telling(kernel, _MOST_MESSAGES),
        kills=kills.kills,
        limit_bytes=kills.limit_bytes,
        lost_gpus=gpus.lost,
        state=(*gpus.state, *others)[:_MOST_LINES],
        left=answered.get("ranks", ())[:_MOST_LINES],
        flights=answered.get("dumps", ()),
        unavailable=unavailable,
        mounts={
            point: f"{mount.kind}, {mount.source}"
            for point, mount in mounted().items()
            if mount.has_server
        },
    )


def kernel_lines(root: Path, age_s: float) -> tuple[str, ...]:
    """Return the relevant lines of the kernel in the last `age_s`.

    Raises:
        Unmeasured: its log cannot be read: many sites keep it for root.
    """
    context, patterns = CheckContext(root=root), [re.compile(_MESSAGES)]
    return most_telling(read_messages(context, patterns, age_s + _CLOCKS_S), _MOST_READ)


def of_the_job(lines: Sequence[str], buses: Sequence[str], count: int | None) -> tuple[str, ...]:
    """Return the lines without Xids of GPUs that belong to other jobs.

    `buses` are those of the GPUs that are visible to the job here, `count` is their number by
    Slurm: if both agree, and an Xid is of none of them, that GPU is another job's.
    """
    own = {_address(bus) for bus in buses}
    if not count or len(own) != count:
        return tuple(lines)
    xids = {line: re.search(XID, line) for line in lines}
    return tuple(line for line, xid in xids.items() if xid is None or _address(xid["bus"]) in own)


def _address(bus: str) -> str:
    """Return a GPU's PCI address without its domain and function, which are not always written."""
    parts = bus.lower().partition(".")[0].split(":")
    return ":".join(parts[-2:])


def memory_kills(root: Path, job: str) -> _Kills:
    """Return how often the kernel killed for memory in the cgroup of the whole job.

    Raises:
        Unmeasured: Slurm gives the job none, or the kernel keeps no count, or none of the steps.
    """
    directory: Path | None = None  # the cgroup of this process, up to `job_12`
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        parts = [part for part in path.split("/") if part]
        counts_memory = not controllers or "memory" in controllers.split(",")
        if counts_memory and f"job_{job}" in parts:
            base = root / _ROOTS["v1" if controllers else "v2"]
            directory = base.joinpath(*parts[: parts.index(f"job_{job}") + 1])
            break
    if directory is None:
        raise Unmeasured("Slurm gives the job no memory cgroup of its own here")
    for name in ("memory.events", _V1_EVENTS):
        counts = dict(re.findall(r"^(\w+) (\d+)$", _read(directory / name), re.MULTILINE))
        kills = whole_number(counts.get("oom_kill", ""))
        if kills == 0 and name == _V1_EVENTS:
            raise Unmeasured(
                "in version 1 of cgroups every step counts for itself, and until it ends"
            )
        if kills is not None:
            limits = (_read(directory / n) for n in ("memory.max", "memory.limit_in_bytes"))
            limit = next((n for text in limits if (n := whole_number(text.strip()))), None)
            return _Kills(kills=kills, limit_bytes=limit)
    raise Unmeasured(f"{directory} counts no kills")


def _memory(root: Path) -> tuple[str, ...]:
    numbers = dict(re.findall(r"^(\w+): +(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    total, free = (int(numbers.get(name, 0)) for name in ("MemTotal", "MemAvailable"))
    if not total or free >= _LOW_SHARE * total:
        return ()
    return (f"{free / 1e6:.1f} of {total / 1e6:.1f} GB of memory are available",)


def _disks(directory: Path) -> tuple[str, ...]:
    """Return the full filesystems of those that a training writes to."""
    lines: dict[int, str] = {}
    for place in dict.fromkeys((directory, Path(tempfile.gettempdir()), _SHARED_MEMORY)):
        try:
            disk = os.statvfs(place)
        except OSError as err:
            lines[-len(lines) - 1] = f"{place}: {err.strerror}"
            continue
        if disk.f_blocks and disk.f_bavail < _LOW_SHARE * disk.f_blocks:
            free, size = (n * disk.f_frsize / 1e9 for n in (disk.f_bavail, disk.f_blocks))
            lines[disk.f_fsid] = f"{place} is full: {free:.1f} of {size:.1f} GB are free"
        elif disk.f_files and disk.f_favail < _LOW_SHARE * disk.f_files:
            lines[disk.f_fsid] = f"{place} has room for {disk.f_favail} more files only"
    return tuple(lines.values())


def links(root: Path) -> tuple[str, ...]:
    """Return the adapter ports and interfaces that are down, or were."""
    machine = CheckContext(root=root)
    lines = []
    for name, port in sorted(read_ports(machine).items()):
        if port.state != "ACTIVE":
            physical = f", {port.physical}" if port.physical else ""
            lines.append(f"{name} is {port.state}{physical}")
        elif port.counters.get("link_downed"):
            lines.append(f"{name} has lost its link {port.counters['link_downed']} times")
    base = "/sys/class/net"
    for name in machine.entries(base):
        flags = int(machine.read_or_none(f"{base}/{name}/flags") or "0x0", 16)
        is_down = machine.read_or_none(f"{base}/{name}/operstate") == "down"
        if flags & _UP and is_down and machine.path(f"{base}/{name}/device").exists():
            lines.append(f"{name} has no link")
    return tuple(lines)


def judged(gpus: Gpus) -> _Gpus:
    """Return the state of GPUs; an old error is no sign of a present fault."""
    finding = Gpu().judge(gpus)
    state = () if finding.status is Status.PASS else (one_line(finding.text),)
    lost = [gpus.broken] if gpus.broken else []
    for gpu in gpus.devices:
        name = f"GPU {gpu.index} ({gpu.bus})" if gpu.bus else f"GPU {gpu.index}"
        if gpu.lost:
            lost.append(f"{name} is lost: {gpu.lost}")
        elif gpu.recovery_action in (_RESET, _REBOOT):
            wanted = "a reset" if gpu.recovery_action == _RESET else "a reboot of the node"
            lost.append(f"{name} needs {wanted}")
    buses = tuple(gpu.bus for gpu in gpus.devices if gpu.bus)
    return _Gpus(buses=buses, lost=tuple(map(one_line, lost)), state=state)


def _left(ranks: Ranks) -> tuple[str, ...]:
    """Return the places of ranks that have not ended with the script."""
    ranks.find()
    samples = ranks.sample()
    where, _ = ranks.locate(again=False) if samples else ({}, {})
    return tuple(sorted(_where(sample) for sample in located(samples, where)))


def _where(sample: RankSample) -> str:
    # A process without srun inherits the number of the batch step, and is no rank.
    of_script = sample.program == SCRIPT
    who = f"process {sample.pid} of the script" if of_script else f"rank {sample.rank}"
    kernel, stack = sample.kernel, sample.stack
    at = f" in {stack[-1].function} ({Path(stack[-1].file).name}:{stack[-1].line})" if stack else ""
    waits = f", {kernel}" if kernel else ""
    return cut(one_line(f"{who} still runs{at}{waits}"), _LINE_CHARACTERS)


def _dumps(node: str, began_s: float, directory: Path) -> tuple[FlightRecord, ...]:
    job = EndedJob(
        end=ScriptEnd(exit_code=1),
        environ=dict(os.environ),
        node=node,
        directory=directory,
        ended_s=time.time(),
        duration_s=time.time() - began_s + _CLOCKS_S,
    )
    mounts = mounted()
    # Dumps on servers are read once, on the batch host.
    reader = FlightDumps(job, reads=lambda path: not mount_of(mounts, str(path)).has_server)
    if not reader.files():
        return ()
    try:
        return reader.collect_data().records
    except NothingCollected as err:
        raise Unmeasured(str(err)) from err


def _read(path: Path) -> str:
    """Return the text of a small file, empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")[: 1 << 16]
    except OSError:
        return ""


def within(state: NodeState, most_bytes: int) -> NodeState:
    """Return a node's state, shortened to a message of `most_bytes`: dumps go first."""
    replaced = msgspec.structs.replace
    without = replaced(
        state, flights=(), unavailable={**state.unavailable, "dumps": "too long to be sent"}
    )
    for shorter in (state, without):
        if sum(map(len, lines_of(NodeReport(node=state.node, state=shorter), 1))) <= most_bytes:
            return shorter
    kernel = most_telling(state.kernel, 5)
    return replaced(without, kernel=kernel, state=state.state[:5], left=state.left[:5])


def most_telling(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """Return at most `most` lines, those with most information, in their order.

    The latest line of every kind comes before a second one of any kind, and faults come first, so
    a flood of lines about one error takes no room from another.
    """
    counts: Counter[tuple[str, str, Status]] = Counter()
    ranked = []
    for place, line in reversed([*enumerate(lines)]):
        named = lost_gpu_named(line)
        error = of_xid(LOST) if named else of_line(line)
        status = error.status if error else Status.PASS
        kind = (error.name, named or error.bus, status) if error else ("", "", status)
        ranked.append((counts[kind], status is not Status.NODE_FAULT, -place))
        counts[kind] += 1
    return tuple(lines[place] for place in sorted(-rank[2] for rank in sorted(ranked)[:most]))
