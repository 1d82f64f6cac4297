# SPDX-License-Identifier: Apache-2.0
"""What a check is: its limits, how it looks, and how it judges what was seen.

A check is a struct whose fields are the settings a site may write in its table of the
configuration. `collect` looks at the machine, in a child process that can be killed, and returns
what it saw; `judge` is pure and turns that into a finding. A check is added in one file and named
in `BUILT_IN`, at the end of this file, or by another distribution through the entry point
`slurm_health.checks`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec

from slurm_health.node.rules.finding import Finding, Status
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import Unmeasured as Unmeasured  # for checks of other packages

if TYPE_CHECKING:
    from slurm_health.node.rules.recovery import BootTime

# Limits that appear in many checks.
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AbsolutePath = Annotated[str, msgspec.Meta(pattern="^/")]
# No file under /proc or /sys that a check reads is longer.
_MOST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_NAMED = 5

_Seen = TypeVar("_Seen")
_T = TypeVar("_T")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a check saw, where it is more than one value: nothing judged yet."""


def require_patterns(*patterns: str) -> None:
    """Refuse settings that are no regular expressions.

    Raises:
        ValueError: one is none.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as err:
            raise ValueError(f"{pattern!r} is not a regular expression: {err}") from err


def first_few(values: Sequence[object]) -> str:
    """Return a list of values as far as a reason has room for them."""
    return ", ".join(map(str, values[:_NAMED])) + (", ..." if len(values) > _NAMED else "")


class CheckContext(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a check looks at, or a recorded tree of one.

    Args:
        root: the directory that stands for `/`.
        environ: the hook's environment: of the job, never to be trusted as more than text.
        now_s: seconds since the epoch.
        state: where a check keeps what it must remember until its next run, None for nowhere.
        context: for which it looks: prolog, epilog, healthcheck or retest.
        looked: what checks that share a child have looked at; None where each looks for itself.
        drained_uptime_s: when the drain was, of this boot, that the checks are run again for.
        returned_uptime_s: when, of this boot, a person last returned the node after a drain.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = {}
    now_s: float = 0.0
    state: Path | None = None
    context: str = "healthcheck"
    looked: dict[str, Any] | None = None
    drained_uptime_s: float | None = None
    returned_uptime_s: float = 0.0

    def path(self, absolute: str) -> Path:
        """Return where a path of the machine is found."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """Return the text of a small file of the machine.

        Raises:
            Unmeasured: it cannot be read.
        """
        try:
            return _first_bytes(self._place(absolute)).decode(errors="replace")
        except OSError as err:
            raise Unmeasured(f"{absolute}: {err.strerror}") from err

    def read_or_none(self, absolute: str) -> str | None:
        """Return the text of a small file of the machine, None where it cannot be read."""
        try:
            return self.read(absolute).strip()
        except Unmeasured:
            return None

    def boot_time(self) -> BootTime | None:
        """Return what time it is by the kernel's own clock; None where it cannot be read."""
        from slurm_health.node.rules.recovery import BootTime  # a node that is well does without

        boot = self.read_or_none("/proc/sys/kernel/random/boot_id")
        uptime = self.read_or_none("/proc/uptime")
        if not boot or not uptime:
            return None
        return BootTime(boot=boot, uptime_s=float(uptime.split()[0]))

    def entries(self, absolute: str) -> list[str]:
        """Return the names in a directory of the machine, none where there is no such directory."""
        try:
            return sorted(os.listdir(self._place(absolute)))  # noqa: PTH208 - see _place
        except OSError:
            return []

    def once(self, what: str, look: Callable[[], _Seen]) -> _Seen:
        """Return what `look` returns; of the checks that share a child the first looks for all."""
        if self.looked is None:
            return look()
        if what not in self.looked:
            self.looked[what] = look()
        seen: _Seen = self.looked[what]
        return seen

    def _place(self, absolute: str) -> str:
        """Return the same as `path`: a node has thousands of processes with a file each."""
        return f"{self.root}/{absolute.lstrip('/')}"


def _first_bytes(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < _MOST_BYTES and (piece := os.read(file, _PIECE_BYTES)):
            data += piece
        return data
    finally:
        os.close(file)


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every check. Fields of a subclass are its settings."""

    # The type of what `collect` returns; it crosses a process boundary.
    SEEN: ClassVar[Any] = Seen
    # The worst a finding may be where the site does not say.
    SEVERITY: ClassVar[Status] = Status.NODE_FAULT
    # Looks at a few files and is done, so that it shares a child with others like it.
    TOGETHER: ClassVar[bool] = False
    # What takes it long to look at: with `TOGETHER`, those that look at the same share one child.
    LOOKS_AT: ClassVar[str] = ""
    # What of a node the check tests: which accusations it can confirm.
    COMPONENTS: ClassVar[tuple[str, ...]] = ()
    # It takes so much of the node that other jobs on it would notice.
    EXCLUSIVE: ClassVar[bool] = False
    # Where it runs where the site does not say.
    CONTEXTS: ClassVar[tuple[str, ...]] = ("prolog", "healthcheck", "retest")

    def collect(self, machine: CheckContext) -> object:
        """Look at the machine.

        Raises:
            Unmeasured: there is nothing to judge.
        """
        raise NotImplementedError

    def judge(self, seen: Any) -> Finding:
        """Judge what was seen. Pure."""
        raise NotImplementedError


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A check as a site wants it run.

    Args:
        name: the name of its table in the configuration.
        check: what to run.
        time_limit_s: after this it is killed, and inconclusive.
        severity: the worst its finding may be.
        shadow: its finding is logged and never acted on.
        contexts: where it runs.
        exclusive: a retest runs it only while no other job is on the node.
        hang_is_fault: not to end within `time_limit_s` is the node's fault.
        nodes: node patterns, empty for all.
        partitions: patterns of partitions, empty for all.
        line: where the configuration names it.
    """

    name: str
    check: Check
    time_limit_s: float
    severity: Status
    shadow: bool
    contexts: tuple[str, ...]
    exclusive: bool = False
    hang_is_fault: bool = False
    nodes: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    line: int = 0


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float
    boot: str
    data: msgspec.Raw


def exchange(machine: CheckContext, key: str, now: _T, kind: type[_T]) -> tuple[_T | None, float]:
    """Keep `now` for the next run; return what the last one kept, and how many seconds ago.

    None when there is nothing to compare with: the first run, or the first after a reboot, which
    sets counters back. A state that cannot be kept is no error: the next run then has nothing
    to compare with either.
    """
    from slurm_health.system.private_files import publish  # few checks remember anything

    if machine.state is None:
        return None, 0.0
    boot = machine.read_or_none("/proc/sys/kernel/random/boot_id") or ""
    path = machine.state / "seen" / f"{key.replace('/', '_')}.json"
    before, age_s = None, 0.0
    with contextlib.suppress(OSError, msgspec.DecodeError):
        kept = from_json(path.read_bytes(), _Kept)
        if kept.boot == boot:
            before = from_json(kept.data, kind)
            age_s = max(0.0, machine.now_s - kept.time_s)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.Raw(msgspec.json.encode(now))
        publish(path, msgspec.json.encode(_Kept(time_s=machine.now_s, boot=boot, data=data)))
    return before, age_s


# --- which there are ---------------------------------------------------------------------------

ENTRY_POINTS = "slurm_health.checks"

BUILT_IN: dict[str, str] = {
    "memory": "slurm_health.node.checks.memory:Memory",
    "swap": "slurm_health.node.checks.memory:Swap",
    "edac": "slurm_health.node.checks.memory:Edac",
    "hugepages": "slurm_health.node.checks.memory:HugePages",
    "filesystem": "slurm_health.node.checks.filesystem:Filesystem",
    "load": "slurm_health.node.checks.tasks:Load",
    "zombies": "slurm_health.node.checks.tasks:Zombies",
    "uninterruptible": "slurm_health.node.checks.tasks:Uninterruptible",
    "leftovers": "slurm_health.node.checks.tasks:Leftovers",
    "daemon": "slurm_health.node.checks.tasks:Daemon",
    "unit": "slurm_health.node.checks.tasks:Unit",
    "clock": "slurm_health.node.checks.clock:Clock",
    "clocksource": "slurm_health.node.checks.clock:ClockSource",
    "cpus": "slurm_health.node.checks.clock:Cpus",
    "cpu-speed": "slurm_health.node.checks.cpu_speed:CpuSpeed",
    "kernel-log": "slurm_health.node.checks.kernel_log:KernelLog",
    "xid": "slurm_health.node.checks.kernel_log:Xid",
    "ethernet": "slurm_health.node.checks.network:Ethernet",
    "infiniband": "slurm_health.node.checks.network:InfiniBand",
    "gpu": "slurm_health.node.checks.gpu:Gpu",
    "gpu-processes": "slurm_health.node.checks.gpu:GpuProcesses",
    "amd-gpu": "slurm_health.node.checks.amd_gpu:AmdGpus",
    "nvme": "slurm_health.node.checks.nvme:Nvme",
    "bmc": "slurm_health.node.checks.bmc:Bmc",
    "optics": "slurm_health.node.checks.optics:Optics",
    "dcgm": "slurm_health.node.checks.dcgm:Dcgm",
    "file": "slurm_health.node.checks.external:File",
    "command": "slurm_health.node.checks.external:Command",
    "nagios": "slurm_health.node.checks.external:Nagios",
    "nhc": "slurm_health.node.checks.external:Nhc",
}


class UnknownCheck(LookupError):
    """There is no check of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"no check is called {name}")


def find_check(name: str) -> type[Check]:
    """Return the check of that name.

    Raises:
        UnknownCheck: none is built in, and no installed distribution brings one.
        ImportError, AttributeError, TypeError: a distribution registered one that cannot be loaded.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: object = getattr(importlib.import_module(module), attribute)
    else:
        found = _from_other_distributions(name)
    if not (isinstance(found, type) and issubclass(found, Check)):
        raise TypeError(f"{name} is registered as a check and is none")
    return found


def _from_other_distributions(name: str) -> object:
    points = _entry_points()
    if name not in points:
        raise UnknownCheck(name, (*BUILT_IN, *points))
    module, _, attribute = points[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _entry_points() -> dict[str, str]:
    # Slow to load, and needed only where a site uses a check that is not ours.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
