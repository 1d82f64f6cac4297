# SPDX-License-Identifier: Apache-2.0
"""Work in child processes with a deadline that holds even against the kernel.

A process that touches a dead GPU or filesystem sleeps in the kernel, where no signal reaches it. So
the hook itself touches nothing: a child does, in a session of its own. A child without an answer at
its deadline is killed, and left behind if it does not die. Nothing here waits for a child longer.

Children that the kernel holds are recorded by the name of their work, and no other is started for
it: a filesystem that froze an hour ago would hold two more with every health check.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.system import proc
from slurm_health.system.signals import signals_delayed

ANSWER_BYTES = 1 << 20
_ANSWER = b"+"
_ERROR = b"-"
# A child whose parent was killed ends by itself, this long after its deadline.
_ORPHAN_S = 1.0
# A killed process ends within milliseconds; on a busy machine it takes longer.
_REAP_S = 2.0
# A process that sleeps in the kernel for this long after its SIGKILL is stuck.
_HELD_S = 0.25
# Below a state directory: a file per stuck child.
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

    `abandoned` is its id if the kernel holds it. `unserved_s`: if it, or a child of its own, was
    ready to run at the deadline, for how long they had not run; 0 if the kernel does not count it.
    (It counts a wait for a processor only once that is over.)
    """

    limit_s: float
    abandoned: int = 0
    unserved_s: float = 0.0


WorkResult = Answered | Broke | Hung


class Child:
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
        """When it is killed, by the monotonic clock."""
        return self.started_s + self.limit_s

    def read(self) -> bool:
        """Read all bytes that have arrived; return False at the end of the answer."""
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
        """Kill the child with its session, unless it was collected: its id may be reused."""
        if self.collected:
            return
        # The process too: a child that has not run yet has no session of its own.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def end(self, killed_s: float) -> bool:
        """Collect the child that was killed at `killed_s`; return False for a stuck one.

        The wait counts from then, so that children killed together wait together.
        """
        process = Path(f"/proc/{self.pid}")
        while True:
            try:
                self.collected = os.waitpid(self.pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                self.collected = True
            if self.collected:
                return True
            waited_s = time.monotonic() - killed_s
            if waited_s > _REAP_S:
                return False
            with contextlib.suppress(OSError, ValueError):
                if waited_s > _HELD_S and proc.stat(process).state == "D":
                    return False
            time.sleep(0.001)

    def hung(self) -> Hung:
        """Return that it has not answered, and for how long it was kept from running."""
        process = Path(f"/proc/{self.pid}")
        ready, ran_s = False, 0.0
        for member in (process, *proc.children(process)):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                ready |= proc.stat(member).state == "R"
                ran_s += proc.scheduled(member)[0]
        unserved_s = max(0.0, self.limit_s - ran_s) if ready and ran_s else 0.0
        return Hung(self.limit_s, unserved_s=unserved_s)

    def result(self) -> WorkResult:
        """Return what it has answered, at the end of that."""
        elapsed_s = time.monotonic() - self.started_s
        if len(self.data) > self._most_bytes:
            return Broke(f"answered more than {self._most_bytes} bytes", elapsed_s)
        if self.data[:1] == _ANSWER:
            return Answered(self.data[1:], elapsed_s)
        if not self.data and elapsed_s > self.limit_s:
            return Hung(self.limit_s)  # it ended by itself, after its deadline
        error = self.data[1:].decode(errors="replace")
        return Broke(error or "its process ended without an answer", elapsed_s)


def run_all(
    work: Mapping[Key, tuple[Work, float]], *, most_bytes: int = ANSWER_BYTES
) -> dict[Key, WorkResult]:
    """Run all work in parallel, in children with their own time limits in seconds.

    Returns within the longest limit and a moment, whatever the children do: killed children are
    collected together, so that on a busy machine their waits do not add up.
    """
    running: dict[Key, Child] = {}
    results: dict[Key, WorkResult] = {}
    with _ending(running):
        for key, (task, limit_s) in work.items():
            # A signal between the fork and this entry would leave the child running; and Python
            # drops an exception of a signal handler during a fork, and with it the user's Ctrl-C.
            with signals_delayed():
                running[key] = Child(task, limit_s, most_bytes)
        _gather(running, results)
    return {key: results[key] for key in work}


def run_one(work: Work, limit_s: float, *, most_bytes: int = ANSWER_BYTES) -> WorkResult:
    """Run work in a child with limits for its time and for the size of its answer."""
    return run_all({"": (work, limit_s)}, most_bytes=most_bytes)[""]


def become(uid: int, gid: int | None = None) -> None:
    """Give up root for a user, for good: this process is led to nothing that the user cannot read.

    `gid` is the user's main group, None for that of the account. Nothing happens without root.

    Raises:
        OSError: that is not possible.
    """
    import pwd  # most children stay who they are

    if os.geteuid() == 0:
        try:
            user = pwd.getpwuid(uid)
            os.initgroups(user.pw_name, gid := user.pw_gid if gid is None else gid)
        except KeyError:  # an id of a container, or of a user of other machines
            os.setgroups([gid := uid if gid is None else gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid,) * 3:
        raise PermissionError(errno.EPERM, f"cannot become user {uid}")


def limit_memory(more_bytes: int) -> None:
    """Limit this process, a child, to so much more memory; beyond is a MemoryError.

    The memory that it has already is a copy of its parent's, which may be large.
    """
    limit = proc.own_memory_bytes() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _gather(running: Mapping[Key, Child], results: dict[Key, WorkResult]) -> None:
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
                # An answer that has arrived by now counts: this process may be late as well.
                done(pipe, child.hung() if child.read() else child.result())
    killed_s = time.monotonic()
    for key, child in running.items():
        result = results[key]
        if not child.end(killed_s) and isinstance(result, Hung):
            results[key] = msgspec.structs.replace(result, abandoned=child.pid)


@contextlib.contextmanager
def _ending(running: Mapping[Key, Child]) -> Iterator[None]:
    """While active, a SIGTERM to this process ends the children before it ends the process.

    Slurm sends SIGTERM and, ten milliseconds later, SIGKILL; the children are in sessions of their
    own and would survive.
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
        ends = signal.SIGTERM, signal.SIGINT, signal.SIGALRM
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)  # a supervisor has all of them blocked
        signal.setitimer(signal.ITIMER_REAL, lifetime_s)
        # Close every other descriptor: slurmd waits until no process holds the hook's output.
        null = os.open(os.devnull, os.O_RDWR)
        pipe = os.dup2(pipe, max(pipe, null, 3) + 1, inheritable=False)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1024)
        try:
            answer = _ANSWER + work()
        except Exception as err:  # a process boundary: the parent records it
            answer = _ERROR + (str(err) or type(err).__name__).encode(errors="replace")[:4096]
        while answer:
            answer = answer[os.write(pipe, answer) :]
        os.close(pipe)  # a thread that the kernel holds would keep it open
        status = 0
    finally:
        os._exit(status)


# --- stuck children ------------------------------------------------------------------------------


class Stuck(msgspec.Struct, frozen=True):
    """A process that was killed and lives on, with its start and the boot: ids are reused."""

    pid: int
    start_ticks: int
    boot: str


def run_guarded(state: Path | None, name: str, work: Work, limit_s: float) -> WorkResult | Stuck:
    """Run work in a child, unless the last child of this name is stuck."""
    held = recall_stuck(state).get(name)
    if held is not None:
        return held
    outcome = run_one(work, limit_s)
    if isinstance(outcome, Hung) and outcome.abandoned:
        remember_stuck(state, name, outcome.abandoned)
    return outcome


def remember_stuck(state: Path | None, name: str, pid: int) -> None:
    """Record that a process is stuck at this work; a failure to write loses the record."""
    stuck = _identity(pid)
    if stuck is not None and state is not None:
        with contextlib.suppress(OSError):
            # One by one: parents that mkdir makes have no mode, and others could enter them.
            for directory in (state, state / _STUCK):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (state / _STUCK / f"{name}.json").write_bytes(msgspec.json.encode(stuck))


def recall_stuck(state: Path | None) -> dict[str, Stuck]:
    """Return the stuck processes by name, and delete the records of those that have ended."""
    stuck: dict[str, Stuck] = {}
    if state is None:
        return stuck
    try:
        paths = list((state / _STUCK).iterdir())
    except OSError:
        return stuck
    for path in paths:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = from_json(path.read_bytes(), Stuck)
            if _identity(record.pid) == record:
                stuck[path.stem] = record
            else:
                path.unlink()
    return stuck


def _identity(pid: int) -> Stuck | None:
    """Return a process with its start and the boot, None for one that has ended."""
    try:
        process = proc.stat(Path(f"/proc/{pid}"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (OSError, ValueError):
        return None
    return None if process.state == "Z" else Stuck(pid, process.start_ticks, boot.strip())
