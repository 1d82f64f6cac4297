# SPDX-License-Identifier: Apache-2.0
"""Work in child processes with a deadline that holds even against the kernel.

A dead GPU or filesystem puts whoever touches it to sleep where no signal reaches. So the hook
itself touches nothing: a child does, in a session of its own. What the child does not answer in
time is killed, and left behind when it does not die. Nothing here ever waits for a child.

Children that the kernel holds are remembered by what they were to do, and none is sent after them:
a filesystem that froze an hour ago would hold two more with every health check.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.system import proc
from slurm_health.system.signals import heard_afterwards

ANSWER_BYTES = 1 << 20
_ANSWER = b"+"
_ERROR = b"-"
# A child whose parent was killed ends by itself, this long after its deadline.
_ORPHAN_S = 1.0
# A killed process ends within milliseconds; on a machine without a free moment it takes longer.
_REAP_S = 2.0
# Whoever sleeps in the kernel for this long after its SIGKILL is held there.
_HELD_S = 0.25
# Below a state directory: which children the kernel holds, one file each.
_STUCK = "stuck"

Work = Callable[[], bytes]
Key = TypeVar("Key")


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The child's work returned this."""

    data: bytes
    elapsed_s: float


class Broke(msgspec.Struct, frozen=True, tag=True):
    """The child's work raised, or the child died."""

    reason: str
    elapsed_s: float


class Hung(msgspec.Struct, frozen=True):
    """The child had not answered at its deadline.

    `abandoned` is its id while the kernel holds it. `unserved_s`: if it, or what it had started,
    was ready to run at the deadline, how long they had been so without a processor; 0 where the
    kernel does not count it.
    """

    limit_s: float
    abandoned: int = 0
    unserved_s: float = 0.0


WorkResult = Answered | Broke | Hung


class _Child:
    """A running child: the read end of its pipe, and when it is killed."""

    def __init__(self, work: Work, limit_s: float, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.limit_s = limit_s
        self.started_s = time.monotonic()
        self.data = b""
        self.collected = False
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _serve(work, writing, limit_s + _ORPHAN_S)
        os.close(writing)
        os.set_blocking(self.pipe, False)

    @property
    def deadline_s(self) -> float:
        return self.started_s + self.limit_s

    def read(self) -> bool:
        """Take all that has arrived; False once nothing more will come."""
        while len(self.data) <= self._most_bytes:
            try:
                chunk = os.read(self.pipe, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.data += chunk
        return False

    def kill(self) -> None:
        """Kill the child with its session. One that was collected may share its id by now."""
        if self.collected:
            return
        # The process too: a child that has not run yet has no session of its own.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def end(self, killed_s: float) -> bool:
        """Collect the child, killed then; False for one that the kernel holds: it is left behind.

        Of all that are killed together none gets longer for having been waited for last.
        """
        while not self._collect():
            waited_s = time.monotonic() - killed_s
            if waited_s > _REAP_S or (waited_s > _HELD_S and _sleeps_in_kernel(self.pid)):
                return False
            time.sleep(0.001)
        return True

    def _collect(self) -> bool:
        try:
            self.collected = os.waitpid(self.pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:
            self.collected = True
        return self.collected

    def hung(self) -> Hung:
        process = Path(f"/proc/{self.pid}")
        return Hung(self.limit_s, unserved_s=_unserved_s([process, *proc.children(process)]))

    def result(self) -> WorkResult:
        elapsed_s = time.monotonic() - self.started_s
        if len(self.data) > self._most_bytes:
            return Broke(f"answered more than {self._most_bytes} bytes", elapsed_s)
        if self.data[:1] == _ANSWER:
            return Answered(self.data[1:], elapsed_s)
        if not self.data and elapsed_s > self.limit_s:
            return Hung(self.limit_s)  # it ended by itself, seen too late
        said = self.data[1:].decode(errors="replace")
        return Broke(said or "its process ended without an answer", elapsed_s)


def run_all(
    work: Mapping[Key, tuple[Work, float]], *, most_bytes: int = ANSWER_BYTES
) -> dict[Key, WorkResult]:
    """Run every piece of work at once, each in a child with its own time limit in seconds.

    Returns within the longest limit and a moment, whatever the children do: all that were killed
    are collected together, so that on a machine without a free moment none adds to the others.
    """
    running: dict[Key, _Child] = {}
    results: dict[Key, WorkResult] = {}
    with _ending(running):
        for key, (task, limit_s) in work.items():
            # Between a child's start and its being known here, nothing would end it; and Python
            # drops what a signal raises while it forks, and with it the user's Ctrl-C.
            with heard_afterwards():
                running[key] = _Child(task, limit_s, most_bytes)
        _gather(running, results)
    return {key: results[key] for key in work}


def run_one(work: Work, limit_s: float, *, most_bytes: int = ANSWER_BYTES) -> WorkResult:
    """Run one piece of work in a child with a time limit, and one for the size of its answer."""
    return run_all({"": (work, limit_s)}, most_bytes=most_bytes)[""]


def limit_memory(more_bytes: int) -> None:
    """Let this process, a child, have so much more memory than it has; beyond is a MemoryError.

    What it has already is its parent's, which may be large for reasons of its own.
    """
    limit = proc.own_memory_bytes() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _gather(running: Mapping[Key, _Child], results: dict[Key, WorkResult]) -> None:
    poll = select.poll()
    by_pipe = {child.pipe: key for key, child in running.items()}
    for pipe in by_pipe:
        poll.register(pipe, select.POLLIN)

    def done(pipe: int, result: WorkResult) -> None:
        poll.unregister(pipe)
        os.close(pipe)
        key = by_pipe.pop(pipe)
        results[key] = result
        running[key].kill()

    while by_pipe:
        nearest_s = min(running[key].deadline_s for key in by_pipe.values())
        wait_s = max(0.0, nearest_s - time.monotonic())
        for pipe, _ in poll.poll(wait_s * 1000):
            child = running[by_pipe[pipe]]
            if not child.read():
                done(pipe, child.result())
        now_s = time.monotonic()
        for pipe, key in list(by_pipe.items()):
            child = running[key]
            if now_s >= child.deadline_s:
                # What it has answered by now counts: whoever reads may be late as well.
                done(pipe, child.hung() if child.read() else child.result())
    killed_s = time.monotonic()
    for key, child in running.items():
        result = results[key]
        if not child.end(killed_s) and isinstance(result, Hung):
            results[key] = msgspec.structs.replace(result, abandoned=child.pid)


def _unserved_s(processes: Iterable[Path]) -> float:
    ready, waited_s = False, 0.0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            ready |= proc.stat(process).state == "R"
            waited_s += proc.scheduled(process)[1]
    return waited_s if ready else 0.0


def _sleeps_in_kernel(pid: int) -> bool:
    try:
        return proc.stat(Path(f"/proc/{pid}")).state == "D"
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _ending(running: Mapping[Key, _Child]) -> Iterator[None]:
    """While active, a SIGTERM to this process ends the children before it ends the process.

    Slurm sends SIGTERM and, ten milliseconds later, SIGKILL; the children are in sessions of
    their own and would live on.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        for child in list(running.values()):
            child.kill()
        os._exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(work: Work, pipe: int, lifetime_s: float) -> None:
    """Be the child: never returns."""
    status = 1
    try:
        os.setsid()
        _reset_signals()
        signal.setitimer(signal.ITIMER_REAL, lifetime_s)
        pipe = _keep_only(pipe)
        try:
            answer = _ANSWER + work()
        except Exception as err:  # a process boundary: the parent records it
            answer = _ERROR + (str(err) or type(err).__name__).encode(errors="replace")[:4096]
        while answer:
            answer = answer[os.write(pipe, answer) :]
        status = 0
    finally:
        os._exit(status)


def _reset_signals() -> None:
    ends = signal.SIGTERM, signal.SIGINT, signal.SIGALRM
    for number in ends:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)  # a supervisor has all of them blocked


def _keep_only(pipe: int) -> int:
    """Close every other descriptor: slurmd waits until nobody holds the hook's output."""
    null = os.open(os.devnull, os.O_RDWR)
    pipe = os.dup2(pipe, max(pipe, null, 3) + 1, inheritable=False)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1024)
    return pipe


# --- what is stuck ------------------------------------------------------------------------------


class Stuck(msgspec.Struct, frozen=True):
    """A process that was killed and lives on. Its start and the boot tell it from later ones."""

    pid: int
    start_ticks: int
    boot: str


def run_guarded(state: Path | None, name: str, work: Work, limit_s: float) -> WorkResult | Stuck:
    """Run one piece of work in a child, unless the last one of this name is stuck."""
    held = recall_stuck(state).get(name)
    if held is not None:
        return held
    outcome = run_one(work, limit_s)
    if isinstance(outcome, Hung) and outcome.abandoned:
        remember_stuck(state, name, outcome.abandoned)
    return outcome


def remember_stuck(state: Path | None, name: str, pid: int) -> None:
    """Keep that a process is stuck at this. Where nothing can be kept, the next one starts."""
    found = _living(pid)
    if found is not None and state is not None:
        with contextlib.suppress(OSError):
            # Each by itself: what is made on the way to a directory others could enter.
            for directory in (state, state / _STUCK):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _stuck_path(state, name).write_bytes(msgspec.json.encode(found))


def recall_stuck(state: Path | None) -> dict[str, Stuck]:
    """Return what is stuck still, by name, and forget the rest."""
    found: dict[str, Stuck] = {}
    if state is None:
        return found
    try:
        names = [each.stem for each in (state / _STUCK).iterdir()]
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = from_json(_stuck_path(state, name).read_bytes(), Stuck)
            if _living(kept.pid) == kept:
                found[name] = kept
            else:
                _stuck_path(state, name).unlink()
    return found


def _stuck_path(state: Path, name: str) -> Path:
    return state / _STUCK / f"{name}.json"


def _living(pid: int) -> Stuck | None:
    """Return a process as it is known again, None for one that has ended."""
    try:
        found = proc.stat(Path(f"/proc/{pid}"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (OSError, ValueError):
        return None
    return None if found.state == "Z" else Stuck(pid, found.start_ticks, boot.strip())
