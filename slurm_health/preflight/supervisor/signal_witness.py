# SPDX-License-Identifier: Apache-2.0
"""Distinguish a signal to one process from one to a whole group or container.

A sentinel is a tiny child that joins a process group, keeps every signal blocked, and writes those
it receives, with their senders, into a pipe. When the supervisor receives a signal and a sentinel
reports the same one from the same sender, it went to both.

A sentinel lives no longer than the process that made it, and with `kill_group` it takes its group
along when that process dies without ending it first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

from slurm_health.system.processes import die_with_parent, fork

ALL_SIGNALS = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
# The longest time between the same signal to two processes of a container.
WINDOW_S = 0.1

_PARENT_DIED = signal.SIGRTMAX
_REPORT = struct.Struct("=iid")
_START_S = 5.0


class Sentinel:
    """A sentinel. One that cannot be started, or is killed, reports nothing."""

    def __init__(self, group: int, *, kill_group: bool = False) -> None:
        """Start it in the process group `group` of this session and wait until it is ready."""
        self._reports: list[tuple[int, int, float]] = []
        self._read, write = os.pipe()
        tie = die_with_parent(_PARENT_DIED)
        parent = os.getpid()
        self._pid = 0
        with contextlib.suppress(OSError):  # no process left for it; the script matters more
            self._pid = fork(lambda: _be_sentinel(write, group, parent, tie, kill_group))
        os.close(write)
        os.set_blocking(self._read, False)
        self._silent = self._pid == 0
        self._drain(_START_S)

    def received(self, number: int, sender: int, *, wait_s: float = 0.0) -> bool:
        """Return whether it received this signal from this sender, within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            self._drain(0.0)
            self._reports = [report for report in self._reports if now - report[2] <= 2 * WINDOW_S]
            if any(report[:2] == (number, sender) for report in self._reports):
                return True
            if now >= deadline or self._silent:
                return False
            self._drain(deadline - now)

    def end(self) -> None:
        """End it and reap it."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0
        os.close(self._read)

    def _drain(self, wait_s: float) -> None:
        if self._silent or not select.select([self._read], [], [], wait_s)[0]:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, _REPORT.size * 64):
                self._reports += _REPORT.iter_unpack(data)
            self._silent = True  # end of file: it is gone


def _be_sentinel(
    write: int, group: int, parent: int, tie: Callable[[], None], kill_group: bool
) -> int:
    """Be the sentinel until the parent has died."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    os.setpgid(0, group)
    tie()
    _close_all_but(write)
    gc.disable()
    os.set_blocking(write, False)
    os.write(write, _REPORT.pack(0, 0, 0.0))
    while True:
        info = signal.sigwaitinfo(ALL_SIGNALS)
        if info.si_signo == _PARENT_DIED and os.getppid() != parent:
            if kill_group:
                os.kill(0, signal.SIGKILL)
            return 1
        with contextlib.suppress(BlockingIOError):
            os.write(write, _REPORT.pack(info.si_signo, info.si_pid, time.monotonic()))


def _close_all_but(kept: int) -> None:
    """Close all inherited files: an open output would keep its reader waiting."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)
