# SPDX-License-Identifier: Apache-2.0
"""The journal: a directory of append-only files, one writer each, on a filesystem all nodes share.

    <root>/<cluster>/<job>/<attempt>/master.jsonl, <node>.jsonl, supervisor.jsonl, requeue.jsonl,
                                     post-mortem.jsonl, restart.jsonl, monitor.jsonl

A writer opens, appends whole lines and closes; a reader opens anew each time, because NFS makes
data visible on close and open. Readers open the names they expect and never rely on a directory
listing, which NFS caches. No lock guards the truth: no file has two writers. Each user's runs are
that user's alone, wherever the root lies: `private_files` opens them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from slurm_health import private_files
from slurm_health.core.record_codec import VERSION, Entry, NewerVersion, decode, encode
from slurm_health.core.records import Record, RunFinished, RunStarted
from slurm_health.errors import JournalError, RecordTooNew

MASTER = "master"
SUPERVISOR = "supervisor"
REQUEUE = "requeue"
POST_MORTEM = "post-mortem"
RESTART = "restart"
MONITOR = "monitor"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_LABEL = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_JOB_ID = re.compile(r"[0-9]{1,10}", re.ASCII)
# A client of a network filesystem waits for so many answers of its server without harm: NFS clients
# of Linux begin with 16 requests at a time, and go up to 64 where the server allows (nfs(5)).
AT_A_TIME = 32
_MANY = 64  # fewer files than this take less than starting threads would
# Each step of a job has a number for its check; further starts of that step lie this far apart.
_NEXT_START = 1000


def job_directory(root: Path, cluster: str, job: int | str) -> Path:
    """Return the directory of one job's attempts."""
    return root / cluster / str(job)


def path_of(directory: Path, writer: str) -> Path:
    """Return the file of one writer: a node's name, or one of the constants above."""
    return directory / _file_of(writer)


def label_of(attempt: int, check: int) -> str:
    """Return the name of a run's directory: `2`, and `2-3` for the third check of attempt 2."""
    return f"{attempt}-{check}" if check > 1 else str(attempt)


def attempt_and_check(label: str) -> tuple[int, int] | None:
    """Return what the name of a run's directory says, None where it is not such a name."""
    match = _LABEL.fullmatch(label)
    return (int(match[1]), int(match[2] or 1)) if match else None


def directory_of_check(root: Path, started: RunStarted) -> tuple[Path, RunStarted]:
    """Return the directory for a check, and the first record it has or is to get.

    A check with this very name is taken over however it stands: whoever gave both the name has not
    heard how the first ended. One that was cut short is taken over if it is of the very same job
    start; one whose requeue did not happen too, because the job is evidently still here.

    Raises:
        JournalError: an older journal cannot be read.
    """

    def is_ours(begun: RunStarted, records: Sequence[Record]) -> bool:
        finished = [record for record in records if isinstance(record, RunFinished)]
        over = finished and not finished[-1].disposition.leaves
        return begun.run_id == started.run_id or (not over and _same_start(begun, started))

    job = job_directory(root, started.cluster, started.job_id)
    labels = (label_of(started.attempt, number) for number in itertools.count(1))
    directory, begun = _first_free(job, labels, is_ours)
    return directory, begun or started


def directory_of_start(job: Path, *, attempt: int, step: int, run_id: str) -> Path:
    """Return the directory of a check that several processes begin together: the same in all.

    Args:
        job: the job's directory.
        attempt: Slurm's restart count.
        step: the job's step that these processes are.
        run_id: what this start of the step is called, and its check with it.

    Raises:
        JournalError: an older journal cannot be read.
    """
    # A check by itself takes a step and the next free number, so none of them is this one's.
    labels = (label_of(attempt, number) for number in itertools.count(step + 2, _NEXT_START))
    return _first_free(job, labels, lambda begun, _: begun.run_id == run_id)[0]


def link_array_task(root: Path, started: RunStarted) -> None:
    """Let an array task be found under the id its user knows, `12_3`.

    Where Slurm counts anew, an older task may have that id too: the newer one takes it.

    Raises:
        JournalError: the link cannot be written.
    """
    shared = private_files.directory(root, started.cluster, owner=os.geteuid(), make=True)
    try:
        with shared as cluster:
            _link(cluster, started.array, str(started.job_id))
    except OSError as err:
        raise unusable(job_directory(root, started.cluster, started.array), "written", err) from err


def _link(directory: int, name: str, target: str) -> None:
    with contextlib.suppress(OSError):
        if os.readlink(name, dir_fd=directory) == target:
            return
    made = f".{name}.{target}"
    with contextlib.suppress(FileExistsError):
        os.symlink(target, made, dir_fd=directory)
    os.replace(made, name, src_dir_fd=directory, dst_dir_fd=directory)


def runs_of(root: Path, cluster: str, job: str, *, owner: int | None = None) -> list[Path]:
    """Return the directories of a job's runs, oldest first; none where there is no such job.

    Args:
        root: the directory of all journals.
        cluster: the job's cluster.
        job: its id, or `12_3` for a task of an array.
        owner: whose the job must be, None for anybody's.

    Raises:
        OSError: its directory cannot be read, or is refused.
    """
    with contextlib.suppress(OSError):
        behind = str(job_directory(root, cluster, job).readlink())
        job = behind if _JOB_ID.fullmatch(behind) else job
    try:
        with private_files.directory(root, cluster, job, owner=owner) as handle:
            names = private_files.directories_in(handle)
    except FileNotFoundError:
        return []
    labelled = [(label, name) for name in names if (label := attempt_and_check(name))]
    return [job_directory(root, cluster, job) / name for _, name in sorted(labelled)]


def create(directory: Path, writers: Iterable[str]) -> None:
    """Make a run's directory, private to its owner, and an empty file per writer that has none.

    Every expected file exists before any reader looks for it, so that no client caches its
    absence.

    Raises:
        JournalError: the directory or a file cannot be written.
    """
    try:
        with opened(directory, os.geteuid(), make=True) as run:

            def make(writer: str) -> None:
                with private_files.opened(run, _file_of(writer), make=True):
                    pass

            _for_each(make, list(writers))
    except OSError as err:
        raise unusable(directory, "written", err) from err


class Writer:
    """Appends to one file. Nobody else writes there."""

    def __init__(self, directory: Path, writer: str, clock: Callable[[], float]) -> None:
        self.path = path_of(directory, writer)
        self._name = writer
        self._clock = clock
        # A writer that takes over from a dead one (master, relaunched agent) goes on counting.
        self._next = _line_count(self.path)

    def append(self, *records: Record) -> None:
        """Append records as whole lines, in order, and make them visible to other nodes.

        Raises:
            JournalError: the file cannot be written; what was written of it is unknown.
        """
        lines = b""
        for record in records:
            entry_id = f"{self._name}:{self._next}"
            lines += encode(record, entry_id=entry_id, time_s=round(self._clock(), 4))
            self._next += 1
        try:
            self._write(lines)
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def copy(self, lines: bytes) -> None:
        """Append whole lines that the writer of this file has made elsewhere, as `append` does.

        Raises:
            JournalError: the file cannot be written; what was written of it is unknown.
        """
        self._next += lines.count(b"\n")
        try:
            self._write(lines)
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def _write(self, lines: bytes) -> None:
        with opened(self.path.parent, os.geteuid()) as run:
            try:
                self._write_in(run, lines)
            except FileNotFoundError:
                self._write_in(run, lines, make=True)

    def _write_in(self, run: int, lines: bytes, *, make: bool = False) -> None:
        flags = os.O_RDWR | os.O_APPEND
        with private_files.opened(run, self.path.name, flags, make=make) as file:
            if _ends_torn(file):
                lines = b"\n" + lines
            while lines:
                lines = lines[os.write(file, lines) :]
            os.fsync(file)


class Reader:
    """Reads one file from where it stopped last time. A torn last line is left for later.

    With `of_anybody` it may be another user's than this process's.
    """

    def __init__(self, directory: Path, writer: str, *, of_anybody: bool = False) -> None:
        self.path = path_of(directory, writer)
        self._owner = None if of_anybody else os.geteuid()
        self._offset = 0

    def read_new(self) -> list[Entry]:
        """Return the entries that have appeared since the last call; none if there is no file.

        Lines that are not records are skipped: a writer that died left them torn.

        Raises:
            RecordTooNew: a newer slurm-health wrote here.
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        try:
            with opened(self.path.parent, self._owner) as run:
                return self.take(self.fetch(run))
        except FileNotFoundError:
            return []
        except OSError as err:
            raise unusable(self.path, "read", err) from err

    def fetch(self, run: int) -> bytes:
        """Return what is new in the file, in the run's directory that is held open.

        Raises:
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        try:
            return private_files.read(run, self.path.name, offset=self._offset)
        except FileNotFoundError:
            return b""
        except OSError as err:
            if err.errno == errno.ESTALE:  # replaced on the server since; the next open sees it
                return b""
            raise unusable(self.path, "read", err) from err

    def take(self, data: bytes) -> list[Entry]:
        """Return the entries in what was fetched.

        Raises:
            RecordTooNew: a newer slurm-health wrote here.
        """
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._decode(whole)

    def _decode(self, data: bytes) -> list[Entry]:
        entries = []
        for line in data.splitlines():
            try:
                entries.append(decode(line))
            except NewerVersion as err:
                raise RecordTooNew(self.path, err.version, VERSION) from err
            except ValueError:
                continue
        return entries


def read_new_of(directory: Path, readers: Sequence[Reader]) -> Iterator[Entry]:
    """Yield what is new in several files of one run, which are opened many at a time.

    Raises:
        RecordTooNew: a newer slurm-health wrote there.
        JournalError: a file is there and cannot be read, or is not to be trusted.
    """
    try:
        with opened(directory, os.geteuid()) as run:
            fetched = _for_each(lambda reader: reader.fetch(run), readers)
    except OSError as err:
        raise unusable(directory, "read", err) from err
    for reader, data in zip(readers, fetched, strict=True):
        yield from reader.take(data)


def read_all(directory: Path, writer: str, *, of_anybody: bool = False) -> list[Entry]:
    """Return all entries of one writer's file, none if there is no such file."""
    return Reader(directory, writer, of_anybody=of_anybody).read_new()


def _for_each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the results in the order of the items; of many, some are worked on at a time."""
    if len(items) < _MANY:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor  # agents and hooks never need it

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        shares = [items[start::AT_A_TIME] for start in range(AT_A_TIME)]
        done = list(pool.map(lambda share: [work(item) for item in share], shares))
    return [done[at % AT_A_TIME][at // AT_A_TIME] for at in range(len(items))]


def _file_of(writer: str) -> str:
    return f"{writer}.jsonl"


def opened(
    directory: Path, owner: int | None, *, make: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Hold open a run's directory, the third one below the root, which must be this owner's.

    Raises:
        OSError: it cannot be opened, or is refused.
    """
    *_, cluster, job, run = directory.parts
    return private_files.directory(directory.parents[2], cluster, job, run, owner=owner, make=make)


def _first_free(
    job: Path, labels: Iterable[str], is_ours: Callable[[RunStarted, Sequence[Record]], bool]
) -> tuple[Path, RunStarted | None]:
    """Return the first directory whose run nobody has begun, or is ours; and how that began."""
    for label in labels:
        records = [entry.record for entry in read_all(job / label, MASTER) if entry.record]
        begun = next((record for record in records if isinstance(record, RunStarted)), None)
        if begun is None or is_ours(begun, records):
            return job / label, begun
    raise AssertionError("labels never end")


def _same_start(before: RunStarted, now: RunStarted) -> bool:
    """Tell a run of this very start from one of an older job that had the same id."""
    return (
        before.nodes == now.nodes
        and before.user == now.user
        and before.start_time_s == now.start_time_s
    )


def _line_count(path: Path) -> int:
    try:
        with opened(path.parent, os.geteuid()) as run:
            return private_files.read(run, path.name).count(b"\n")
    except FileNotFoundError:
        return 0
    except OSError as err:
        raise unusable(path, "written", err) from err


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def unusable(path: Path, done: str, err: OSError) -> JournalError:
    """Return the error to raise where a file could not be "written" or "read"."""
    problem = f"cannot be {done}: {err.strerror or err}"
    if done == "written":
        problem += "; choose a directory on a filesystem that all nodes share"
    elif err.errno == errno.EPERM:
        problem += "; have it removed, or choose another directory"
    else:
        return JournalError(path, problem)
    return JournalError(path, f"{problem} with --journal DIR or SLURM_HEALTH_JOURNAL")
