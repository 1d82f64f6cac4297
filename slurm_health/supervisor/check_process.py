# SPDX-License-Identifier: Apache-2.0
"""The check as a process beside the supervisor: started, listened to, ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_health.processes import die_with_parent, exit_text
from slurm_health.supervisor.signal_witness import ALL_SIGNALS

# Signals whose default action is not to end a process.
HARMLESS = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGURG,
        signal.SIGWINCH,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)
DISPOSITIONS = ("proceed", "requeue", "hold", "stop")

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_UNKILLABLE_S = 5.0  # how long to wait for a killed process that hangs in the kernel
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The master's last line: what becomes of the job; `nodes` as in `RunFinished`."""

    disposition: str
    exit_code: int = 0
    reason: str = ""
    run_directory: str = ""
    nodes: tuple[str, ...] = ()


class Interrupted(Exception):
    """A signal came that ends a process which has made no provision for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"signal {number}")


class NoAnswer(Exception):
    """The master ended without its last line."""


def ask(
    argv: Sequence[str],
    *,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    grace_s: float,
    interrupted: Callable[[int], None],
) -> Answer:
    """Run the master to its end; nothing that it started is left when this returns or raises.

    Every signal must be blocked; the master gets `mask`. `interrupted` is told the number of a
    signal that ends it at once, because Slurm may kill us while it ends.

    Raises:
        Interrupted: a signal came; the master had `grace_s` to end.
        NoAnswer: the master could not be started, or ended without saying anything.
    """
    with _adopting_orphans():
        try:
            process = _start(argv, environ, mask)
        except (OSError, subprocess.SubprocessError) as err:
            raise NoAnswer(f"cannot be started: {err}") from err
        try:
            output = _listen(process)
        except Interrupted as interruption:
            interrupted(interruption.number)
            raise
        finally:
            _end_descendants(process.pid, grace_s)
    answer = _parsed(output)
    if answer is None:
        raise NoAnswer(f"ended without a verdict ({exit_text(process.returncode)})")
    return answer


def _start(
    argv: Sequence[str], environ: Mapping[bytes, bytes], mask: Collection[int]
) -> subprocess.Popen[bytes]:
    tie = die_with_parent()

    def prepare() -> None:
        tie()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there are no threads here
    )


def _listen(process: subprocess.Popen[bytes]) -> bytes:
    """Return what the master printed, once it has ended."""
    assert process.stdout is not None
    output = b""
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        while True:
            info = signal.sigtimedwait(ALL_SIGNALS, _POLL_S)
            if info is not None and info.si_signo not in HARMLESS:
                raise Interrupted(info.si_signo)
            ended = process.poll() is not None
            output += pipe.read() or b""
            if ended:
                return output


def _parsed(output: bytes) -> Answer | None:
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("disposition") not in DISPOSITIONS:
        return None
    code = found.get("exit_code", 0)
    return Answer(
        disposition=found["disposition"],
        exit_code=code if isinstance(code, int) else 0,
        reason=str(found.get("reason", "")),
        run_directory=str(found.get("run_directory", "")),
        nodes=tuple(map(str, found.get("nodes") or ())),
    )


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Have orphans of this process's descendants become its children, so that none is missed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_descendants(master: int, grace_s: float) -> None:
    """End the master's group, then whatever it left behind; kill what has not ended in time.

    Only orphans are told beside the master, which ends its own children in its own order.
    """
    deadline = time.monotonic() + grace_s
    told: set[int] = set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(master, signal.SIGTERM)
    told.add(master)
    while True:
        _reap()
        parents = _parents()
        alive = _below(os.getpid(), parents)
        now = time.monotonic()
        if not alive or now > deadline + _UNKILLABLE_S:
            return
        orphans = {pid for pid in alive if parents[pid] == os.getpid()} - told
        late = now >= deadline
        for pid in alive if late else orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= orphans
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parents() -> dict[int, int]:
    """Return the parent of every process on this machine that we can see."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot loop
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - hot loop
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            parents[int(name)] = int(fields[1])
    return parents


def _below(root: int, parents: Mapping[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.update(below)
        frontier += below
    return found
