# SPDX-License-Identifier: Apache-2.0
"""Signals of this process: delaying them, leaving on one, and their names."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from slurm_health.records.text import signal_text

# Signals that mean only what a script's trap makes of them, such as `--signal=B:USR1@120`. SIGTERM
# and SIGINT are not among them: they come with a cancellation and with the time limit too.
FOR_SCRIPT = frozenset(
    {
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGHUP,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
_DELAYED = (signal.SIGINT, signal.SIGTERM)
_ANEW_S = 0.01  # a callback that drops an exception takes far less


@contextlib.contextmanager
def signals_delayed() -> Iterator[set[int]]:
    """Delay Ctrl-C and SIGTERM until the end of the context; provide the signal mask from before.

    Of this thread only: another thread may receive a signal of the process.
    """
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _DELAYED)
        yield set(ours)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours)


@contextlib.contextmanager
def leaving_on(number: int) -> Iterator[None]:
    """While active, a signal raises SystemExit, once, with the code 128+n.

    Python prints and drops an exception in a destructor or a weak reference's callback, such as
    that of an import. A dropped SystemExit or KeyboardInterrupt is raised again a moment later.
    After the context the signal is ignored.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once: the cleanup is not interrupted
        raise SystemExit(128 + number)

    def raise_anew(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, (SystemExit, KeyboardInterrupt)):
            before(dropped)
            return
        left = isinstance(dropped.exc_value, SystemExit)
        wait_s, begun = _ANEW_S, False
        while not begun:  # on a busy machine it comes before this function ends, and is dropped too
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                if left:
                    signal.signal(number, leave)
                again = number if left else signal.SIGINT
                threading.Timer(wait_s, os.kill, (os.getpid(), again)).start()
                begun = True
            wait_s *= 2

    before, sys.unraisablehook = sys.unraisablehook, raise_anew
    signal.signal(number, leave)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)
        sys.unraisablehook = before


def exit_text(returncode: int) -> str:
    """Return how a process ended: `exit code 3`, or `killed by SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal_text(-returncode)}"


signal_name = signal_text


def signal_behind(end: KeyboardInterrupt | SystemExit) -> str:
    """Return the name of the signal that raised this exception, for example by `leaving_on`."""
    if isinstance(end, KeyboardInterrupt):
        return signal.SIGINT.name
    return signal_text(end.code - 128) if isinstance(end.code, int) else "no signal"
