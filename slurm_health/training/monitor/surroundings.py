# SPDX-License-Identifier: Apache-2.0
"""What Slurm, the kernel of the batch host and the monitor say of the job that has failed.

Many jobs may fail at the same moment, as those of an array that miss a file, and slurmctld is then
the last that should hear of it: it is asked once, where it can know more than the script.
"""

from __future__ import annotations

import re
from pathlib import Path

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import read_messages
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    BLOCK_IO_ERROR,
    HUNG_TASK,
    MACHINE_CHECK,
    OUT_OF_MEMORY,
)
from slurm_health.records.errors import JournalError, SlurmError, Unmeasured
from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.script_records import (
    Diagnosed,
    HangFound,
    HangOver,
    SlowdownFound,
    StragglerFound,
)
from slurm_health.records.text import whole_number
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import (
    KernelMessages,
    MemoryEvents,
    MonitorSaw,
    SlurmView,
)
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected

# What the operators look for, and what a person wants to see beside it.
_MESSAGES = "|".join((ANY_XID, OUT_OF_MEMORY, MACHINE_CHECK, BLOCK_IO_ERROR, HUNG_TASK))
_ROOTS = {"v1": "sys/fs/cgroup/memory", "v2": "sys/fs/cgroup"}
_SLURM_S = 5.0


class MemoryKills:
    """How often the kernel killed for memory in the job's cgroup on the batch host."""

    name = "memory-events"
    data = MemoryEvents

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def is_enabled(self, job: EndedJob) -> Enabled:
        """Slurm must confine the job in a cgroup of its own."""
        if self._directory(job) is None:
            return Enabled("Slurm gives the job no memory cgroup of its own here")
        return Enabled()

    def collect_data(self, job: EndedJob) -> MemoryEvents:
        """Read the count of the cgroup of the whole job.

        Raises:
            NothingCollected: the kernel keeps none.
        """
        directory = self._directory(job)
        assert directory is not None
        for name in ("memory.events", "memory.oom_control"):
            counts = dict(re.findall(r"^(\w+) (\d+)$", _read(directory / name), re.MULTILINE))
            kills = whole_number(counts.get("oom_kill", ""))
            if kills is not None:
                limits = (_read(directory / n) for n in ("memory.max", "memory.limit_in_bytes"))
                limit = next((n for text in limits if (n := whole_number(text.strip()))), None)
                return MemoryEvents(node=job.node, kills=kills, limit_bytes=limit)
        raise NothingCollected(f"{directory} counts no kills")

    def _directory(self, job: EndedJob) -> Path | None:
        """Return the cgroup of the job: that of this process, up to `job_12`."""
        mark = f"job_{job.environ.get('SLURM_JOB_ID', '')}"
        for line in _read(self._root / "proc/self/cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if controllers and "memory" not in controllers.split(","):
                continue
            parts = [part for part in path.split("/") if part]
            if mark in parts:
                base = self._root / _ROOTS["v1" if controllers else "v2"]
                return base.joinpath(*parts[: parts.index(mark) + 1])
        return None


class KernelLog:
    """What the kernel of the batch host said since the script began."""

    name = "kernel-log"
    data = KernelMessages

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def is_enabled(self, job: EndedJob) -> Enabled:
        """The log must be readable: most sites keep it for root."""
        try:
            with (self._root / "dev/kmsg").open("rb"):
                return Enabled()
        except OSError as err:
            return Enabled(f"/dev/kmsg of {job.node}: {err.strerror}")

    def collect_data(self, job: EndedJob) -> KernelMessages:
        """Read the messages that matter, no older than the script.

        Raises:
            NothingCollected: the log cannot be read.
        """
        try:
            found = read_messages(CheckContext(root=self._root), _MESSAGES, job.duration_s + 1.0)
        except Unmeasured as err:
            raise NothingCollected(str(err)) from err
        return KernelMessages(node=job.node, messages=tuple(each.text for each in found))


def _read(path: Path) -> str:
    """Return the text of a small file, empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")[: 1 << 16]
    except OSError:
        return ""


class SlurmWord:
    """The states of the job and of its nodes."""

    name = "slurm"
    data = SlurmView

    def is_enabled(self, job: EndedJob) -> Enabled:
        """It must be a job that has lost a node without being lost itself, or was ended."""
        if not _name(job) or not job.end.nodes:
            return Enabled("this is no job of Slurm's")
        if len(job.end.nodes) == 1 and not job.end.by_a_signal:
            return Enabled("not asked: the job has one node, and no signal ended it")
        return Enabled()

    def collect_data(self, job: EndedJob) -> SlurmView:
        """Ask for all nodes at once, and for the job where a signal ended it.

        Raises:
            NothingCollected: Slurm does not answer.
        """
        client = Client.for_hook(job.environ, limit_s=_SLURM_S)
        try:
            nodes = client.nodes(job.end.nodes)
            states = client.job(_name(job)).states if job.end.by_a_signal else ()
        except SlurmError as err:
            raise NothingCollected(str(err)) from err
        return SlurmView(
            job_states=tuple(sorted(states)),
            node_states={name: node.state for name, node in nodes.items()},
        )


def _name(job: EndedJob) -> str:
    """Return the job as Slurm's commands call it; a task of an array never by its number alone."""
    array, task = (job.environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else job.environ.get("SLURM_JOB_ID", "")


class MonitorFindings:
    """A hang that was not over when the script ended, and what was slow before."""

    name = "monitor"
    data = MonitorSaw

    def is_enabled(self, job: EndedJob) -> Enabled:
        """The job must have a journal."""
        return Enabled() if job.run_directory else Enabled("the job has no journal")

    def collect_data(self, job: EndedJob) -> MonitorSaw:
        """Read what was recorded since the script began: by this node's clock, as its end is.

        Raises:
            NothingCollected: the monitor recorded nothing, or that cannot be read.
        """
        assert job.run_directory is not None
        began_s = job.ended_s - job.duration_s
        hang: HangFound | None = None
        slow: list[Diagnosed] = []
        cancels = False
        try:
            for entry in journal.read_all(job.run_directory, journal.MONITOR):
                if entry.time_s < began_s:
                    continue
                if isinstance(entry.record, HangFound):
                    hang = entry.record
                elif isinstance(entry.record, HangOver):
                    hang = None
                elif isinstance(entry.record, ActionIntended | ActionDone):
                    cancels = entry.record.action is Action.CANCEL and not isinstance(
                        entry.record, ActionDone
                    )
                elif isinstance(entry.record, StragglerFound | SlowdownFound):
                    slow += [entry.record.found] if entry.record.found else []
        except JournalError as err:
            raise NothingCollected(str(err)) from err
        if hang is None and not slow:
            raise NothingCollected("the monitor saw no hang, and nothing that was slow")
        return MonitorSaw(hang=hang, cancels=cancels, slow=tuple(slow))
