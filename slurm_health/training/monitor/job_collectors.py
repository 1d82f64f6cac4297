# SPDX-License-Identifier: Apache-2.0
"""Collectors about the end of a job: its output, Slurm's view, the monitor's events.

Many jobs may fail at the same moment, such as the tasks of an array without their input, and must
not overload slurmctld: it is asked once, and only if it can know more than the script.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from pathlib import Path

from slurm_health.records.allocation import name_in_slurm
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    Unchecked,
    VerdictReached,
)
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.records.text import cut
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import (
    Listeners,
    MonitorReport,
    SlurmView,
    TrainingLog,
)
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataCollector, NothingCollected
from slurm_health.training.monitor import connections
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.output_files import srun_files

# Of the job's own output: a thousand ranks write 4 MB when their connections break.
JOB_TAIL_BYTES = 16 << 20
# Of any further file, and the number of these: the latest ones.
TASK_TAIL_BYTES = 256 << 10
MOST_TASK_FILES = 64
_SLACK_S = 120.0  # clocks of a file server and a node differ by less
_SLURM_S = 5.0
_MOST_OF_CHECK = 100  # reasons of the check before the script


class JobOutput(DataCollector):
    """The job's standard output and error, and the files of its sruns."""

    kind = "job-output"
    data = TrainingLog

    def __init__(self, job: EndedJob) -> None:
        self._job = job

    def collect_data(self) -> TrainingLog:
        """Read and decode the ends of the files.

        Raises:
            NothingCollected: none of them can be read.
        """
        job = self._job
        texts = []
        problems = []
        files = dict.fromkeys(job.outputs, JOB_TAIL_BYTES)
        since_s = job.ended_s - job.duration_s - _SLACK_S
        latest = srun_files(job.script_text, job.directory, job.environ, since_s=since_s)
        of_tasks = [path for path in latest if path not in files][:MOST_TASK_FILES]
        files |= dict.fromkeys(sorted(of_tasks), TASK_TAIL_BYTES)
        for path, most_bytes in files.items():
            try:
                text = tail(path, most_bytes, begin=job.output_from.get(path, 0))
            except OSError as err:
                problems.append(f"{path}: {err.strerror or err}")
                continue
            texts.append((str(path), text))
        if not texts:
            raise NothingCollected("; ".join(problems) or "standard output and error are no files")
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job.ended_s - job.duration_s))
        shared = sum(name in set(map(str, job.outputs)) for name, _ in texts)
        return read_output(texts, began=began, shared=shared)


def tail(path: Path, most_bytes: int, *, begin: int = 0) -> str:
    """Return the end of a file, from `begin` on, as text.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if not path.is_file():
            raise OSError(f"{path} is no plain file")
        begin = begin if begin <= size else 0  # it was replaced or cut since
        start = max(begin, size - most_bytes)
        data = b""
        while len(data) < most_bytes:
            chunk = os.pread(file, most_bytes - len(data), start + len(data))
            if not chunk:
                break
            data += chunk
    finally:
        os.close(file)
    return data.decode(errors="replace")


class SlurmWord(DataCollector):
    """The states of the job and of its nodes."""

    kind = "slurm"
    data = SlurmView

    def __init__(self, job: EndedJob) -> None:
        self._job = job

    def collect_data(self) -> SlurmView:
        """Ask for all nodes at once, and for the job: its state counts if a signal ended it.

        Raises:
            NothingCollected: Slurm does not answer, or can know no more than the script.
        """
        job = self._job
        if not name_in_slurm(job.environ) or not job.end.nodes:
            raise NothingCollected("this is no Slurm job")
        if len(job.end.nodes) == 1 and not job.end.by_a_signal:
            raise NothingCollected("not asked: the job has one node, and no signal ended it")
        client = Client.for_hook(job.environ, limit_s=_SLURM_S)
        try:
            nodes = client.nodes(job.end.nodes)
            asked = client.job(name_in_slurm(job.environ))
        except SlurmError as err:
            raise NothingCollected(str(err)) from err
        return SlurmView(
            job_states=tuple(sorted(asked.states)) if job.end.by_a_signal else (),
            node_states={name: node.state for name, node in nodes.items()},
            required=asked.required,
        )


class PortHolders(DataCollector):
    """The owners of listening ports of the batch host, where most rendezvous are."""

    kind = "ports"
    data = Listeners

    def collect_data(self) -> Listeners:
        """Return the owner of every port, and the process if it is this user's."""
        holders: dict[int, str] = {}
        inodes: dict[str, int] = {}
        for listener in connections.listening():
            inodes[str(listener.inode)] = listener.port
            user = f"user {listener.uid}"
            with contextlib.suppress(KeyError):
                user = pwd.getpwuid(listener.uid).pw_name
            holders[listener.port] = f"a process of {user}"
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is another user's, or has ended
                for link in (directory / "fd").iterdir():
                    target = str(link.readlink())
                    if target.startswith("socket:[") and (port := inodes.get(target[8:-1])):
                        command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                        words = cut(command.decode(errors="replace").strip(), 80)
                        holders[port] = f"process {directory.name} ({words})"
        return Listeners(holders=holders)


class MonitorFindings(DataCollector):
    """A hang that was not over when the script ended, slow ranks, doubts of the check before."""

    kind = "monitor"
    data = MonitorReport

    def __init__(self, job: EndedJob) -> None:
        self._job = job

    def collect_data(self) -> MonitorReport:
        """Read the records since the script began: this node's clock timed both.

        Raises:
            NothingCollected: there are no records, or they cannot be read.
        """
        job = self._job
        if job.run_directory is None:
            raise NothingCollected("the job has no journal")
        began_s = job.ended_s - job.duration_s
        hang: TrainingEvent | None = None
        slow: list[Diagnosed] = []
        check: dict[str, None] = {}
        ended_by: Action | None = None
        try:
            for entry in journal.read_all(job.run_directory, journal.MASTER):
                match entry.record:
                    case Unchecked(reason=reason):
                        check[reason] = None
                    case VerdictReached(nodes=nodes):
                        doubted = [node for node in nodes if node.level is not Level.HEALTHY]
                        texts = ((node.reason, *node.evidence) for node in doubted)
                        check |= dict.fromkeys(text for of_node in texts for text in of_node)
            for entry in journal.read_all(job.run_directory, journal.MONITOR):
                if entry.time_s < began_s:
                    continue
                match entry.record:
                    case TrainingEvent(event=EventKind.HANG) as hang:
                        pass
                    case TrainingEvent(event=EventKind.HANG_OVER):
                        hang = None
                    case TrainingEvent(
                        event=EventKind.STRAGGLER | EventKind.SLOWDOWN, diagnosed=Diagnosed() as why
                    ):
                        slow.append(why)
                    case ActionIntended(action=ended_by):
                        pass
                    case ActionDone():
                        ended_by = None
        except JournalError as err:
            raise NothingCollected(str(err)) from err
        if hang is None and not slow and not check:
            raise NothingCollected("the monitor recorded no hang, and no slow rank")
        return MonitorReport(
            hang=hang,
            cancels=ended_by is Action.CANCEL,
            ends_script=ended_by is Action.END_SCRIPT,
            slow=tuple(slow),
            check=tuple(check)[:_MOST_OF_CHECK],
        )
