# SPDX-License-Identifier: Apache-2.0
"""Three sources for the place of a rank: its heartbeat, PyTorch's Flight Recorder, py-spy.

A rank with a heartbeat answers a byte in a pipe, first with its stack, then with its collectives.
The Flight Recorder of another rank has a pipe if the environment names one: after a line with a 1
its own thread writes a dump, independent of the rank's main thread. py-spy reads the memory of a
process without stopping it (`--nonblocking`), so a stack may be torn: then it is read once more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slurm_health import heartbeat
from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.system import proc
from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.collectives import Operation
from slurm_health.training.diagnosis.samples import Frame
from slurm_health.training.monitor.flight_dumps import latest, prefixes, read_dump, record_of

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # to which torch adds the rank, and `.pipe`
_MARK = f"/memfd:{heartbeat.NAME} "  # a heartbeat in /proc; the kernel adds "(deleted)"
_MOST_FRAMES = 40
_MOST_OPERATIONS = 64  # of a group: some steps, which show the collectives of a step
_MOST_ANSWER_BYTES = 16 << 20
_STACK_S = 2.0  # of one process
_TRIES = 2
_AT_ONCE = 4
_INSTALL = "py-spy is not installed (pip install 'slurm-health[diagnosis]')"


class Beat(NamedTuple):
    """The fields of a heartbeat, in the order of `heartbeat.LAYOUT` and `WORK_LAYOUT`."""

    magic: bytes
    serial: int
    rank: int
    step: int
    steps: int
    first_s: float
    last_s: float
    longest_s: float
    own_s: float
    own_steps: int
    loading_s: float
    batches: int
    data_ended: bool
    ask: int
    answer: int
    serial_again: int
    tokens: float = 0.0
    replica: int = heartbeat.UNKNOWN_REPLICA
    role: bytes = b""


class Voice:
    """A source for the place of a rank; this base class has none.

    Attributes:
        answered: the rank has answered with its stack.
        stack: outermost call first.
        flight: its collectives.
    """

    def __init__(self) -> None:
        self.answered = False
        self.stack: tuple[Frame, ...] = ()
        self.flight: FlightRecord | None = None

    def ask(self) -> bool:
        """Drop earlier answers, and ask; return whether an answer may come."""
        self.answered, self.stack, self.flight = False, (), None
        return False

    def poll(self) -> bool:
        """Read answers; return whether they are complete."""
        return True


class Heartbeat(Voice):
    """A rank's own heartbeat: an open file of its process."""

    def __init__(self, process: Path, file: int) -> None:
        super().__init__()
        self._files = process / "fd"
        self._file = file
        self._asked = 0

    def read(self) -> Beat:
        """Read it.

        Raises:
            OSError: the process has ended.
            ValueError: it is no heartbeat, or changes during every read.
        """
        layout, work = heartbeat.LAYOUT, heartbeat.WORK_LAYOUT
        for _ in range(3):
            with (self._files / str(self._file)).open("rb", buffering=0) as file:
                data = file.read(layout.size + work.size)
            if len(data) < layout.size:
                continue
            beat = Beat(*layout.unpack(data[: layout.size]))
            if beat.magic != heartbeat.MAGIC or beat.serial != beat.serial_again:
                continue
            if len(data) < layout.size + work.size:
                return beat  # of an older copy of heartbeat.py
            *behind, serial = work.unpack(data[layout.size :])
            if serial == beat.serial:
                return Beat(*beat[:16], *behind)
        raise ValueError("no heartbeat")

    def ask(self) -> bool:
        """Write a byte into its pipe."""
        super().ask()
        self._asked = self._asked % 255 + 1
        with contextlib.suppress(OSError, ValueError):
            return _write(self._files / str(self.read().ask), bytes([self._asked]))
        return False

    def poll(self) -> bool:
        """Read its answer: the stack comes at once, the record when torch returns it."""
        with contextlib.suppress(OSError, ValueError):
            beat = self.read()
            path = self._files / str(beat.answer)
            if not path.is_file():  # opening a FIFO waits for its other end
                return False
            with path.open("rb") as file:
                answer = from_json(file.read(_MOST_ANSWER_BYTES), dict[str, Any])
            if answer.get("asked") != self._asked:
                return False
            self.answered = True
            with contextlib.suppress(TypeError, ValueError):
                self.stack = tuple(
                    Frame(str(file)[-300:], int(line), str(function)[:100])
                    for file, line, function in answer["stack"][-_MOST_FRAMES:]
                )
            with contextlib.suppress(Exception):  # other versions of torch may record anything
                self.flight = record_of(answer["flight"] or {}, beat.rank, _kept)
            return "flight" in answer
        return False


class Recorder(Voice):
    """The Flight Recorder of a rank without a heartbeat, in its environment and directory."""

    def __init__(self, rank: int, process: Path) -> None:
        super().__init__()
        self._rank = rank
        self._process = process
        self._dump = Path()
        self._before_ns = 0

    def ask(self) -> bool:
        """Write a line into its pipe, which an old torch may not read or make."""
        super().ask()
        with contextlib.suppress(OSError):
            environ = proc.environ_of(self._process)
            prefix, dumps = environ.get(PIPE, ""), next(prefixes(environ), "")
            if prefix and dumps:
                directory = (self._process / "cwd").readlink()
                self._dump = directory / f"{dumps}{self._rank}"
                self._before_ns = self._written_ns()
                return _write(directory / f"{prefix}{self._rank}.pipe", b"1\n")
        return False

    def poll(self) -> bool:
        """Read the dump, if it is new; it may be incomplete."""
        with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError):
            if self._written_ns() > self._before_ns:
                self.flight = read_dump(self._dump, self._rank, _kept)
        return self.flight is not None

    def _written_ns(self) -> int:
        """Return when this user wrote the dump, 0 if there is none."""
        try:
            status = self._dump.stat(follow_symlinks=False)
        except OSError:
            return 0
        ours = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
        return status.st_mtime_ns if ours else 0


def heartbeats(process: Path) -> list[tuple[int, tuple[int, int]]]:
    """Return the heartbeats among the open files of a process, with their identities.

    Raises:
        OSError: the process has ended.
    """
    beats = []
    with os.scandir(process / "fd") as entries:
        for entry in entries:
            file = Path(entry.path)
            if str(file.readlink()).startswith(_MARK):
                status = file.stat()
                beats.append((int(entry.name), (status.st_dev, status.st_ino)))
    return beats


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of main threads by process, outermost call first; why some are missing."""

    by_pid: dict[int, tuple[Frame, ...]] = {}
    why_not: str = ""


class _Frame(msgspec.Struct):
    filename: str
    name: str
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame] = []
    os_thread_id: int | None = None
    thread_name: str | None = None


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside our own interpreter, or among the user's commands."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(pids: Sequence[int], *, wait_s: float, command: str | None = None) -> Stacks:
    """Return the stacks of processes that can be read within `wait_s`."""
    program = command or find_py_spy()
    if program is None:
        return Stacks(why_not=_INSTALL)
    until_s = time.monotonic() + wait_s
    stacks: dict[int, tuple[Frame, ...]] = {}
    why_not = ""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for pid, stack in [(pid, pool.submit(_stack, program, pid, until_s)) for pid in pids]:
            try:
                stacks[pid] = stack.result()
            except (OSError, ValueError) as err:
                why_not = cut(one_line(str(err) or "py-spy did not answer in time"), 200)
    return Stacks(stacks, why_not)


def _stack(command: str, pid: int, until_s: float) -> tuple[Frame, ...]:
    """Return the stack of one main thread.

    Raises:
        OSError: py-spy cannot run, or not in time.
        ValueError: py-spy reports an error, or its answer cannot be read.
    """
    # It takes a megabyte, and most agents never need it.
    from slurm_health.system.processes import run

    # Only its own stack shows that a process waits in MPI, and only while it is paused.
    with Path(f"/proc/{pid}/maps").open(errors="replace") as maps:
        how = "--native" if any("/libmpi" in line for line in maps) else "--nonblocking"
    argv = [command, "dump", how, "--json", "--pid", str(pid)]
    error = ""
    for _ in range(_TRIES):
        left_s = min(_STACK_S, until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        ended = run(argv, environ=dict(os.environ), deadline_s=left_s)
        if ended.returncode == 0:
            try:
                threads = from_json(ended.stdout, list[_Thread])
            except msgspec.MsgspecError as err:
                raise ValueError(f"py-spy's answer cannot be read: {err}") from err
            for thread in threads:
                if thread.os_thread_id == pid or thread.thread_name == "MainThread":
                    frames = [Frame(f.filename[-300:], f.line, f.name[:100]) for f in thread.frames]
                    return tuple(frames[:_MOST_FRAMES][::-1])
            raise ValueError("py-spy reported no main thread")
        error = ended.stderr.decode(errors="replace")
        if "permission denied" in error.lower():
            raise ValueError("py-spy may not read processes: ptrace is not allowed here")
    raise ValueError(f"py-spy: {error}")


def _write(pipe: Path, data: bytes) -> bool:
    """Write to a pipe that has a reader; return whether it is one.

    The number of an open file may belong to another file by now, which a byte would spoil. Opening
    a pipe without a reader fails at once.

    Raises:
        OSError: it cannot be written to.
    """
    if not stat.S_ISFIFO(pipe.stat().st_mode):
        return False
    handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        return stat.S_ISFIFO(os.fstat(handle).st_mode) and os.write(handle, data) > 0
    finally:
        os.close(handle)


def _kept(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    return latest(operations, _MOST_OPERATIONS)
