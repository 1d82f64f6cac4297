# SPDX-License-Identifier: Apache-2.0
"""The user's script as a process: started as Slurm would, and sent what Slurm sent only to us.

The script gets a process group of its own, as slurmstepd gives a batch script one, so that its
`kill 0` ends what it started and not the supervisor. Signals that Slurm delivers to every process
of the job reach it without us; those meant for the batch script arrive at the supervisor, which
stands in its place, and are passed on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from slurm_health.processes import fork
from slurm_health.supervisor.signal_witness import ALL_SIGNALS, WINDOW_S, Sentinel

# What Python changes at its start; everything else is as it was given to us.
_CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
# All that follows the interpreter is one argument, whatever blanks are in it.
_INTERPRETER_LINE = re.compile(rb"#![ \t]*([^ \t]+)[ \t]*(.*?)[ \t]*$", re.DOTALL)
_KERNEL_READS = 256  # bytes of a file in which the kernel looks for the interpreter line


def command_line(script: bytes, path: Path, arguments: Sequence[str]) -> list[bytes]:
    """Return the command the kernel makes of executing `script`, which lies at `path`.

    Running the interpreter ourselves lets the script lie where nothing may be executed.

    Raises:
        OSError: the kernel would not know how to execute it.
    """
    line = _INTERPRETER_LINE.match(script[:_KERNEL_READS].split(b"\n")[0])
    if line is None:
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC))
    interpreter, argument = line.groups()
    words = [os.fsencode(word) for word in (str(path), *arguments)]
    return [interpreter, argument, *words] if argument else [interpreter, *words]


class ScriptProcess:
    """The running script. Every signal must be blocked in the process that makes one."""

    def __init__(
        self,
        argv: list[bytes],
        *,
        environ: Mapping[bytes, bytes],
        mask: Collection[int],
    ) -> None:
        """Start it with this environment and signal mask, and all else as it was given to us."""
        waiting, gate = os.pipe()

        def begin() -> int:
            os.close(gate)
            return _become(argv, environ, mask, waiting)

        self.pid = fork(begin)
        os.close(waiting)
        with contextlib.suppress(OSError):  # the child does it too; whoever is first
            os.setpgid(self.pid, self.pid)
        self._inside = Sentinel(self.pid, kill_group=True)
        self._beside = Sentinel(os.getpgrp())
        os.write(gate, b"!")  # now it may begin
        os.close(gate)

    def wait(self, on_child: Callable[[], object]) -> int:
        """Pass signals on until the script ends; return its wait status.

        `on_child` is called whenever a child, ours or another, may have ended.
        """
        try:
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return status
                info = signal.sigwaitinfo(ALL_SIGNALS)
                if info.si_signo == signal.SIGCHLD:
                    on_child()
                else:
                    self._route(info.si_signo, info.si_pid)
        finally:
            self._inside.end()
            self._beside.end()

    def _route(self, number: int, sender: int) -> None:
        """Deliver a signal to whom it would have reached had the script been in our place."""
        if self._inside.heard(number, sender, wait_s=WINDOW_S):
            return  # sent to every process of the job: the script has it
        send = os.killpg if self._beside.heard(number, sender) else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(self.pid, number)


def _become(
    argv: list[bytes], environ: Mapping[bytes, bytes], mask: Collection[int], waiting: int
) -> int:
    """Become the script, or return the code to end with where that cannot be."""
    os.setpgid(0, 0)
    if not os.read(waiting, 1):
        return 1  # the supervisor was killed before it could say so
    for number in _CHANGED_BY_PYTHON:
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execve(argv[0], argv, environ)  # noqa: S606 - it is what Slurm would have done
    except OSError as err:
        # The words and the code that slurmstepd has for it.
        interpreter = os.fsdecode(argv[0])
        print(f"slurm-health: execve(): {interpreter}: {err.strerror}", file=sys.stderr, flush=True)
        return err.errno or 1
