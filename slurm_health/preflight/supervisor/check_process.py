# SPDX-License-Identifier: Apache-2.0
"""The check as a process beside the supervisor: start it, read its answer, end its processes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight.supervisor.process_tree import Tree, tree_of
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

# A check that proceeds writes a heartbeat this often. After `SILENCE_S` without output it is ended:
# that is longer than it takes to read a setup file and to find torch, or waits for slurmctld.
BEAT_S = 10.0
SILENCE_S = 240.0

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_UNKILLABLE_S = 5.0  # how long to wait for a killed process that hangs in the kernel
_libc = ctypes.CDLL(None, use_errno=True)


def tell(outcome: JobOutcome, directory: Path | str = "") -> None:
    """Print the outcome of the job, in the process of the check; the last such line counts."""
    outcome = msgspec.structs.replace(outcome, directory=str(directory))
    print(msgspec.json.encode(outcome).decode(), flush=True)


def heartbeat(monotonic: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Return a function for the check to call as it proceeds: an empty line every `BEAT_S`.

    A part of the check that hangs, such as its journal's filesystem, stops the heartbeat too.
    """
    due_s = monotonic() + BEAT_S

    def beat() -> None:
        nonlocal due_s
        if monotonic() >= due_s:
            due_s = monotonic() + BEAT_S
            with contextlib.suppress(OSError):  # the supervisor is gone, and ends us next
                print(flush=True)

    return beat


class Interrupted(Exception):
    """A signal arrived that ends a process without a handler.

    `answer` is the check's answer until then.
    """

    def __init__(self, number: int, answer: JobOutcome | None = None) -> None:
        self.number = number
        self.answer = answer
        super().__init__(f"signal {number}")


class NoAnswer(Exception):
    """The check ended without an answer, or died while it acted on its `answer`."""

    def __init__(self, text: str, answer: JobOutcome | None = None) -> None:
        self.answer = answer
        super().__init__(text)


class OutOfTime(NoAnswer):
    """The check had no answer when its time was over."""


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
    """Run the check to its end; none of its processes is left when this returns or raises.

    Every signal must be blocked; the check gets `mask` and `FOR_SCRIPT` blocked. `interrupted` is
    called at once on a signal that ends it, because Slurm may kill us while it ends.

    Raises:
        Interrupted: a signal arrived that is not `FOR_SCRIPT`; the check had `grace_s` to end.
        NoAnswer: the check could not be started, ended without an answer, or hangs.
        OutOfTime: it had no answer within `limit_s`.
    """
    # Orphans of this process's descendants become its children, so that none is missed.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        try:
            blocked = FOR_SCRIPT.union(mask)
            check = processes.start_tied(
                argv, environ=environ, stdout=processes.PIPE, stderr=None, signal_mask=blocked
            )
        except OSError as err:
            raise NoAnswer(f"cannot be started: {err}") from err
        try:
            return _await_answer(check, silence_s, limit_s)
        except Interrupted as interruption:
            interrupted(interruption)
            raise
        finally:
            _end_children(check, grace_s)
            processes.close_pipes(check)
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _await_answer(check: processes.Process, silence_s: float, limit_s: float) -> JobOutcome:
    """Return the answer of the check, once it has ended.

    Raises:
        Interrupted: a signal arrived.
        NoAnswer: it ended without an answer, or wrote nothing for `silence_s`.
        OutOfTime: it had no answer within `limit_s`.
    """
    output = b""
    began_s = last_output_s = polled_s = time.monotonic()
    while True:
        info = signal.sigtimedwait(_OURS, _POLL_S)
        ended = check.poll() is not None
        new_output = processes.read_available(check.stdout)
        output += new_output
        if info is not None and info.si_signo not in HARMLESS:
            raise Interrupted(info.si_signo, _answer(output))
        if ended:
            break
        last_poll_s, polled_s = polled_s, time.monotonic()
        # A pause of ours, such as that of a suspended job, was one of the check as well.
        if new_output or polled_s - last_poll_s > silence_s / 2:
            last_output_s = polled_s
        if polled_s - began_s > limit_s and _answer(output) is None:
            raise OutOfTime(f"its limit was {limit_s:.0f} s")
        if polled_s - last_output_s > silence_s:
            raise NoAnswer(f"it hangs: no output for {silence_s:g} s", _answer(output))
    answer = _answer(output)
    # An answer does not count if the check died while it asked Slurm for that: it starts again, and
    # the journal has what it asked.
    if answer is None or check.returncode < 0 or check.returncode == ExitCode.INTERNAL:
        raise NoAnswer(f"ended without a verdict ({exit_text(check.returncode)})", answer)
    return answer


def _answer(output: bytes) -> JobOutcome | None:
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(msgspec.MsgspecError):
        return from_json(lines[-1], JobOutcome) if lines else None
    return None


def _end_children(check: processes.Process, grace_s: float) -> None:
    """End the check's group, then its other processes; kill those that do not end in time.

    Only orphans are signalled beside the check, which ends its own children in its own order. The
    children of a killed process become ours, and are killed next. Those of a check that the kernel
    holds are signalled, and killed last.
    """
    deadline = time.monotonic() + grace_s
    processes.kill_session(check, signal.SIGTERM)
    signalled = {check.pid}
    while (left := _descendants()) and time.monotonic() <= deadline + _UNKILLABLE_S:
        late = time.monotonic() >= deadline
        children = {pid for pid, process in left.items() if process.parent == os.getpid()}
        for pid in children if late else children - signalled:
            _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        if late:
            for pid in left.keys() - children - signalled:
                _send(pid, signal.SIGTERM)
            signalled |= left.keys()
        signalled |= children
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
    for pid in left:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> Tree:
    """Reap the children of this process that have ended; return its descendants."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    tree = tree_of(os.getpid())
    tree.pop(os.getpid(), None)
    return tree
