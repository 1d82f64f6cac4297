# SPDX-License-Identifier: Apache-2.0
"""A check, the machine that it measures, and the built-in checks.

A check is a struct whose fields are the settings a site may write in its table of the config file.
`measure` measures the machine, in a child process that can be killed, and returns a finding. A
check is added in one file and named in `BUILT_IN`; a site's own is a `command`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from slurm_health.node.rules.finding import Finding, Status
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import Unmeasured

if TYPE_CHECKING:
    from slurm_health.node.rules.recovery import BootTime

# Limits that appear in many checks.
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AbsolutePath = Annotated[str, msgspec.Meta(pattern="^/")]
Weight = Literal["warn", "fault", "ignore"]
# No file under /proc or /sys that a check reads is longer.
_MOST_BYTES = 1 << 20
_NAMED = 5
# How far a record of counters reaches back, and how far apart its entries are at least.
HISTORY_S = 6 * 3600.0
_APART_S = 300.0
# Links come up, and train, for some minutes after a boot.
LINKS_SETTLE_S = 600.0

_T = TypeVar("_T")


class NotApplicable(Unmeasured):
    """This machine has no device or job of the kind that a check is for."""


def require_patterns(*patterns: str) -> None:
    """Refuse settings that are no regular expressions.

    Raises:
        ValueError: a pattern does not compile.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as err:
            raise ValueError(f"{pattern!r} is not a regular expression: {err}") from err


def first_few(values: Sequence[object]) -> str:
    """Return the first values of a list, as many as a reason has room for."""
    return ", ".join(map(str, values[:_NAMED])) + (", ..." if len(values) > _NAMED else "")


class CheckContext(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a check measures, or a recorded tree of one.

    Args:
        root: the directory that stands for `/`.
        environ: the hook's environment, which the job's user may have set: text, not to be trusted.
        now_s: seconds since the epoch.
        state: where checks save values for their next run, None for nowhere.
        context: prolog, epilog, healthcheck or retest.
        shared: readings that the checks of one child share; None if every check reads anew.
        drained_uptime_s: the uptime at the drain, in a retest after a drain in this boot.
        returned_uptime_s: the uptime at which an administrator last returned the node.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = {}
    now_s: float = 0.0
    state: Path | None = None
    context: str = "healthcheck"
    shared: dict[str, Any] | None = None
    drained_uptime_s: float | None = None
    returned_uptime_s: float = 0.0

    def path(self, absolute: str) -> Path:
        """Return where a path of the machine is."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """Return the text of a small file of the machine.

        Raises:
            Unmeasured: it cannot be read.
        """
        try:
            file = os.open(self._place(absolute), os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = b""
                while len(data) < _MOST_BYTES and (piece := os.read(file, 1 << 16)):
                    data += piece
            finally:
                os.close(file)
        except OSError as err:
            raise Unmeasured(f"{absolute}: {err.strerror}") from err
        return data.decode(errors="replace")

    def read_or_none(self, absolute: str) -> str | None:
        """Return the text of a small file of the machine, None if it cannot be read."""
        try:
            return self.read(absolute).strip()
        except Unmeasured:
            return None

    def number(self, absolute: str) -> int | None:
        """Return the whole number in a file of the machine, None if it has none."""
        text = self.read_or_none(absolute)
        return int(text) if text and text.lstrip("-").isdigit() else None

    def boot_time(self) -> BootTime | None:
        """Return the time by the kernel's own clock; None if it cannot be read."""
        from slurm_health.node.rules.recovery import BootTime  # a healthy node does without

        boot = self.read_or_none("/proc/sys/kernel/random/boot_id")
        uptime = self.read_or_none("/proc/uptime")
        if not boot or not uptime:
            return None
        return BootTime(boot=boot, uptime_s=float(uptime.split()[0]))

    def is_settled(self) -> bool:
        """Return whether the boot is so long ago that a link that is down stays down."""
        booted = self.boot_time()
        return booted is None or booted.uptime_s >= LINKS_SETTLE_S

    def entries(self, absolute: str) -> list[str]:
        """Return the names in a directory of the machine, none if there is no such directory."""
        try:
            return sorted(os.listdir(self._place(absolute)))  # noqa: PTH208 - see _place
        except OSError:
            return []

    def once(self, key: str, read: Callable[[], _T]) -> _T:
        """Return what `read` returns; of the checks that share a child, the first reads for all."""
        if self.shared is None:
            return read()
        if key not in self.shared:
            self.shared[key] = read()
        value: _T = self.shared[key]
        return value

    def history(self, key: str, now: _T, kind: type[_T]) -> list[tuple[float, _T]]:
        """Save `now` for the next runs; return the values of earlier runs, the oldest first.

        Values come with their ages in seconds, at most six hours. A reboot sets counters back, so
        no value of an earlier boot is returned. A failure to save loses the value.
        """
        from slurm_health.system.private_files import publish  # few checks remember anything

        if self.state is None:
            return []
        boot = self.read_or_none("/proc/sys/kernel/random/boot_id") or ""
        path = self.state / "history" / f"{key.replace('/', '_')}.json"
        kept: list[tuple[float, _T]] = []
        with contextlib.suppress(OSError, msgspec.DecodeError):
            earlier = from_json(path.read_bytes(), _Kept)
            if earlier.boot == boot:
                # One from the future is by a clock that was set back since.
                kept = [
                    (min(time_s, self.now_s), from_json(value, kind))
                    for time_s, value in earlier.values
                    if self.now_s - time_s <= HISTORY_S
                ]
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The last one always stays: the next run compares with it.
            thinned = kept[:-1] if kept[1:] and kept[-1][0] - kept[-2][0] < _APART_S else kept
            values = [
                (time_s, msgspec.Raw(msgspec.json.encode(value)))
                for time_s, value in [*thinned, (self.now_s, now)]
            ]
            publish(path, msgspec.json.encode(_Kept(boot=boot, values=values)))
        return [(self.now_s - time_s, value) for time_s, value in kept]

    def _place(self, absolute: str) -> str:
        """Return the same as `path`: a node has thousands of processes with a file each."""
        return f"{self.root}/{absolute.lstrip('/')}"


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    boot: str
    values: list[tuple[float, msgspec.Raw]]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every check. Fields of a subclass are its settings."""

    # The worst a finding may be if the site does not say.
    SEVERITY: ClassVar[Status] = Status.NODE_FAULT
    # It reads only a few files, so that it shares a child with others like it.
    TOGETHER: ClassVar[bool] = False
    # A reading that takes long: with `TOGETHER`, checks with the same reading share one child.
    READS: ClassVar[str] = ""
    # The components of a node that it tests: accusations of these it can confirm.
    COMPONENTS: ClassVar[tuple[str, ...]] = ()
    # It takes so much of the node that other jobs on it would notice.
    EXCLUSIVE: ClassVar[bool] = False
    # The hooks that run it if the site does not say.
    CONTEXTS: ClassVar[tuple[str, ...]] = ("prolog", "healthcheck", "retest")

    def measure(self, machine: CheckContext) -> Finding:
        """Measure the machine and judge it.

        Raises:
            Unmeasured: there is nothing to judge.
            NotApplicable: the machine has nothing of the kind that the check is for.
        """
        raise NotImplementedError


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A check as a site wants it run.

    Args:
        name: the name of its table in the config file.
        check: the check with its settings.
        time_limit_s: after this it is killed, and inconclusive.
        severity: the worst its finding may be.
        shadow: its finding is logged and never acted on.
        contexts: the hooks that run it.
        exclusive: a retest runs it only while no other job is on the node.
        hang_is_fault: if it does not end within `time_limit_s`, the node is faulty.
        nodes: node patterns, empty for all.
        partitions: patterns of partitions, empty for all.
        line: of its table in the config file.
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


# --- the built-in checks -------------------------------------------------------------------------

_HERE = "slurm_health.node.checks"
BUILT_IN: dict[str, str] = {
    "memory": f"{_HERE}.memory:Memory",
    "swap": f"{_HERE}.memory:Swap",
    "edac": f"{_HERE}.memory:Edac",
    "filesystem": f"{_HERE}.filesystem:Filesystem",
    "storage-clients": f"{_HERE}.filesystem:StorageClients",
    "load": f"{_HERE}.tasks:Load",
    "leftovers": f"{_HERE}.tasks:Leftovers",
    "watches": f"{_HERE}.watches:Watches",
    "daemon": f"{_HERE}.tasks:Daemon",
    "clocksource": f"{_HERE}.clock:ClockSource",
    "cpus": f"{_HERE}.clock:Cpus",
    "cpu-speed": f"{_HERE}.cpu_speed:CpuSpeed",
    "kernel-log": f"{_HERE}.kernel_log:KernelLog",
    "xid": f"{_HERE}.kernel_log:Xid",
    "ethernet": f"{_HERE}.network:Ethernet",
    "infiniband": f"{_HERE}.network:InfiniBand",
    "gpu": f"{_HERE}.gpu:Gpu",
    "gpu-processes": f"{_HERE}.gpu:GpuProcesses",
    "amd-gpu": f"{_HERE}.vendors:AmdGpus",
    "nvme": f"{_HERE}.vendors:Nvme",
    "bmc": f"{_HERE}.vendors:Bmc",
    "dcgm": f"{_HERE}.vendors:Dcgm",
    "file": f"{_HERE}.external:File",
    "command": f"{_HERE}.external:Command",
    "nhc": f"{_HERE}.external:Nhc",
}


def check_type(name: str) -> type[Check]:
    """Return the check of that name, of `BUILT_IN`."""
    module, _, attribute = BUILT_IN[name].partition(":")
    kind: type[Check] = getattr(importlib.import_module(module), attribute)
    return kind
