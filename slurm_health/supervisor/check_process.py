# SPDX-License-Identifier: Apache-2.0
"""The check as a process beside the supervisor: started, listened to, ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from slurm_health.core.records import Disposition, RunFinished
from slurm_health.errors import ExitCode
from slurm_health.processes import (
    PIPE,
    Process,
    close_pipes,
    exit_text,
    kill_session,
    read_available,
    start_tied,
)
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

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_UNKILLABLE_S = 5.0  # how long to wait for a killed process that hangs in the kernel
_libc = ctypes.CDLL(None, use_errno=True)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the job, as the check says in a line of its own; its last line counts."""

    disposition: Literal["proceed", "requeue", "hold", "stop"]
    exit_code: int = 0
    reason: str = ""
    run_directory: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def leaves(self) -> bool:
        """Whether the job leaves its nodes: Slurm ends this attempt of it."""
        return Disposition(self.disposition).leaves


def tell(finished: RunFinished, run_directory: Path | str = "") -> None:
    """Say, in the process of the check, how it ends."""
    said = {**msgspec.to_builtins(finished), "run_directory": str(run_directory)}
    print(msgspec.json.encode(msgspec.convert(said, Answer)).decode(), flush=True)


class Interrupted(Exception):
    """A signal came that ends a process which has made no provision for it.

    `answer` is what the check had said by then.
    """

    def __init__(self, number: int, answer: Answer | None = None) -> None:
        self.number = number
        self.answer = answer
        super().__init__(f"signal {number}")


class NoAnswer(Exception):
    """The check ended without saying what becomes of the job, or died over what it `said`."""

    def __init__(self, text: str, said: Answer | None = None) -> None:
        self.said = said
        super().__init__(text)


def ask(
    argv: Sequence[str],
    *,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    grace_s: float,
    interrupted: Callable[[Interrupted], None],
) -> Answer:
    """Run the check to its end; nothing that it started is left when this returns or raises.

    Every signal must be blocked; the check gets `mask`. `interrupted` is told at once of a signal
    that ends it, because Slurm may kill us while it ends.

    Raises:
        Interrupted: a signal came; the check had `grace_s` to end.
        NoAnswer: the check could not be started, or ended without saying anything.
    """
    with _adopting_orphans():
        try:
            check = start_tied(argv, environ=environ, stdout=PIPE, stderr=None, signal_mask=mask)
        except OSError as err:
            raise NoAnswer(f"cannot be started: {err}") from err
        try:
            return _listen(check)
        except Interrupted as interruption:
            interrupted(interruption)
            raise
        finally:
            _end_children(check, grace_s)
            close_pipes(check)


def _listen(check: Process) -> Answer:
    """Return what the check says, once it has ended.

    Raises:
        Interrupted: a signal came.
        NoAnswer: it ended without an answer.
    """
    output = b""
    while True:
        info = signal.sigtimedwait(ALL_SIGNALS, _POLL_S)
        ended = check.poll() is not None
        output += read_available(check.stdout)
        if info is not None and info.si_signo not in HARMLESS:
            raise Interrupted(info.si_signo, _answer(output))
        if ended:
            break
    answer = _answer(output)
    # What it said it would ask of Slurm is no answer where it died over it: it is started again,
    # and the journal tells what was asked.
    if answer is None or check.returncode < 0 or check.returncode == ExitCode.INTERNAL:
        raise NoAnswer(f"ended without a verdict ({exit_text(check.returncode)})", answer)
    return answer


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Have orphans of this process's descendants become its children, so that none is missed."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _answer(output: bytes) -> Answer | None:
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(lines[-1], type=Answer) if lines else None
    return None


def _end_children(check: Process, grace_s: float) -> None:
    """End the check's group, then whatever it left behind; kill what has not ended in time.

    Only orphans are told beside the check, which ends its own children in its own order. The
    children of whoever is killed become ours, and are killed next.
    """
    deadline = time.monotonic() + grace_s
    kill_session(check, signal.SIGTERM)
    told = {check.pid}
    while (children := _children()) and time.monotonic() <= deadline + _UNKILLABLE_S:
        late = time.monotonic() >= deadline
        for pid in children if late else children - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= children
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)


def _children() -> set[int]:
    """Reap the children of this process that have ended; return the others."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found
