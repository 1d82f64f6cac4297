# SPDX-License-Identifier: Apache-2.0
"""The check as a process beside the supervisor: started, listened to, ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import JobOutcome
from slurm_health.system import processes
from slurm_health.system.signals import FOR_SCRIPT, exit_text

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

# The others are left pending: they wait in the kernel for the script.
_OURS = ALL_SIGNALS - FOR_SCRIPT

# A check that gets on says so this often. One that has said nothing for `SILENCE_S` is given up:
# that is longer than it reads a setup file and looks for torch, or waits for slurmctld. Where it
# comes too early, the check is started again and goes on from its journal.
BEAT_S = 10.0
SILENCE_S = 240.0

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_UNKILLABLE_S = 5.0  # how long to wait for a killed process that hangs in the kernel
_libc = ctypes.CDLL(None, use_errno=True)


def tell(outcome: JobOutcome, directory: Path | str = "") -> None:
    """Print, in the process of the check, what becomes of the job; its last such line counts."""
    outcome = msgspec.structs.replace(outcome, directory=str(directory))
    print(msgspec.json.encode(outcome).decode(), flush=True)


def heartbeat(monotonic: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Return what the check calls as it gets on: every `BEAT_S` an empty line, which is no answer.

    What hangs in the middle of a check, such as its journal's filesystem, holds this up as well.
    """
    due_s = monotonic() + BEAT_S

    def beat() -> None:
        nonlocal due_s
        if monotonic() >= due_s:
            due_s = monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # the supervisor is gone, and we are ended next
                print(flush=True)

    return beat


class Interrupted(Exception):
    """A signal came that ends a process which has made no provision for it.

    `answer` is what the check had said by then.
    """

    def __init__(self, number: int, answer: JobOutcome | None = None) -> None:
        self.number = number
        self.answer = answer
        super().__init__(f"signal {number}")


class NoAnswer(Exception):
    """The check ended without saying what becomes of the job, or died over what it `said`."""

    def __init__(self, text: str, said: JobOutcome | None = None) -> None:
        self.said = said
        super().__init__(text)


class OutOfTime(NoAnswer):
    """The check had not said what becomes of the job when its time was over."""


def ask(
    argv: Sequence[str],
    *,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    grace_s: float,
    silence_s: float,
    interrupted: Callable[[Interrupted], None],
    limit_s: float = math.inf,
) -> JobOutcome:
    """Run the check to its end; nothing that it started is left when this returns or raises.

    Every signal must be blocked; the check gets `mask`, and what is `FOR_SCRIPT` blocked beside it.
    `interrupted` is told at once of a signal that ends it, because Slurm may kill us while it ends.

    Raises:
        Interrupted: a signal came that is not `FOR_SCRIPT`; the check had `grace_s` to end.
        NoAnswer: the check could not be started, ended without saying anything, or hangs.
        OutOfTime: it has not said anything within `limit_s`.
    """
    with _adopting_orphans():
        try:
            blocked = FOR_SCRIPT.union(mask)
            check = processes.start_tied(
                argv, environ=environ, stdout=processes.PIPE, stderr=None, signal_mask=blocked
            )
        except OSError as err:
            raise NoAnswer(f"cannot be started: {err}") from err
        try:
            return _listen(check, silence_s, limit_s)
        except Interrupted as interruption:
            interrupted(interruption)
            raise
        finally:
            _end_children(check, grace_s)
            processes.close_pipes(check)


def _listen(check: processes.Process, silence_s: float, limit_s: float) -> JobOutcome:
    """Return what the check says, once it has ended.

    Raises:
        Interrupted: a signal came.
        NoAnswer: it ended without an answer, or has said nothing for `silence_s`.
        OutOfTime: it has given no answer within `limit_s`.
    """
    output = b""
    began_s = heard_s = looked_s = time.monotonic()
    while True:
        info = signal.sigtimedwait(_OURS, _POLL_S)
        ended = check.poll() is not None
        said = processes.read_available(check.stdout)
        output += said
        if info is not None and info.si_signo not in HARMLESS:
            raise Interrupted(info.si_signo, _answer(output))
        if ended:
            break
        looked_before_s, looked_s = looked_s, time.monotonic()
        # What held us up, as a suspended job, has held up the check as well.
        if said or looked_s - looked_before_s > silence_s / 2:
            heard_s = looked_s
        if looked_s - began_s > limit_s and _answer(output) is None:
            raise OutOfTime(f"it was given {limit_s:.0f} s")
        if looked_s - heard_s > silence_s:
            raise NoAnswer(f"it hangs: nothing heard for {silence_s:g} s", _answer(output))
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


def _answer(output: bytes) -> JobOutcome | None:
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(msgspec.MsgspecError):
        return from_json(lines[-1], JobOutcome) if lines else None
    return None


def _end_children(check: processes.Process, grace_s: float) -> None:
    """End the check's group, then whatever it left behind; kill what has not ended in time.

    Only orphans are told beside the check, which ends its own children in its own order. The
    children of whoever is killed become ours, and are killed next. Those of a check that the kernel
    holds are told, and killed at the very last.
    """
    deadline = time.monotonic() + grace_s
    processes.kill_session(check, signal.SIGTERM)
    told = {check.pid}
    while (left := _descendants()) and time.monotonic() <= deadline + _UNKILLABLE_S:
        late = time.monotonic() >= deadline
        children = {pid for pid, parent in left.items() if parent == os.getpid()}
        for pid in children if late else children - told:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            for pid in left.keys() - children - told:
                _send(pid, signal.SIGTERM)
            told |= left.keys()
        told |= children
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
    for pid in left:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> dict[int, int]:
    """Reap the children of this process that have ended; return all below it, with their parents.

    A process comes after its parent.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_bytes().rpartition(b")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found: dict[int, int] = {}
    level = {os.getpid()}
    while level:
        below = {pid: parent for pid, parent in parents.items() if parent in level}
        found |= below
        level = set(below)
    return found
