# SPDX-License-Identifier: Apache-2.0
"""The user's script as a process: start it as Slurm would, forward signals, end it.

The script gets a process group of its own, as slurmstepd gives a batch script one, so that its
`kill 0` ends what it started and not the supervisor. Signals that Slurm delivers to every process
of the job reach it without us. Those for the batch script arrive at the supervisor, which runs in
its place and forwards them. One that arrives while the nodes are checked is not for the script: it
has nothing to save yet, and no trap.

A script that hangs is ended with all its processes here, and with its steps. Its interpreter comes
first, so that it does not run its next command once a step has ended. Ranks may be in sessions of
their own, as torchrun's are, or stopped; so all descendants of the script are killed. Steps on
other nodes outlive a killed srun, and Slurm ends them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.supervisor.environ import as_text
from slurm_health.preflight.supervisor.process_tree import Tree, tree_of
from slurm_health.preflight.supervisor.recorder import say
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS, WINDOW_S, Sentinel
from slurm_health.system.processes import fork
from slurm_health.system.signals import FOR_SCRIPT

# Python changes these at its start, and nothing else.
_CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
# All after the interpreter is one argument, with its blanks.
_INTERPRETER_LINE = re.compile(rb"#![ \t]*([^ \t]+)[ \t]*(.*?)[ \t]*$", re.DOTALL)
_KERNEL_READS = 256  # bytes of a file in which the kernel looks for the interpreter line


def command_line(script: bytes, path: Path, arguments: Sequence[str]) -> list[bytes]:
    """Return the command by which the kernel executes `script` at `path`.

    We run the interpreter ourselves: the script may be on a filesystem without execution.

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
        self, argv: list[bytes], *, environ: Mapping[bytes, bytes], mask: Collection[int]
    ) -> None:
        """Start it with this environment and signal mask, and all else as we have it.

        `early` holds those of `FOR_SCRIPT` that arrived before it, and are dropped. `received`
        holds the signals that arrived while it ran, from any sender.
        """
        waiting, gate = os.pipe()

        def begin() -> int:
            os.close(gate)
            return _become(argv, environ, mask, waiting)

        self.pid = fork(begin)
        os.close(waiting)
        with contextlib.suppress(OSError):  # the child does it too
            os.setpgid(self.pid, self.pid)
        self._inside = Sentinel(self.pid, kill_group=True)
        self._beside = Sentinel(os.getpgrp())
        self.early = FOR_SCRIPT & signal.sigpending()
        for number in self.early:
            while signal.sigtimedwait({number}, 0):  # real-time signals queue
                pass
        self.received: set[int] = set()
        os.write(gate, b"!")  # now it may begin
        os.close(gate)

    def wait(self, on_child: Callable[[], object]) -> int:
        """Forward signals until the script ends; return its wait status.

        `on_child` is called whenever a child may have ended.
        """
        try:
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return status
                info = signal.sigwaitinfo(ALL_SIGNALS)
                number, sender = info.si_signo, info.si_pid
                if number == signal.SIGCHLD:
                    on_child()
                    continue
                self.received.add(number)
                if self._inside.received(number, sender, wait_s=WINDOW_S):
                    continue  # it went to every process of the job: the script has it
                send = os.killpg if self._beside.received(number, sender) else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(self.pid, number)
        finally:
            self._inside.end()
            self._beside.end()


def _become(
    argv: list[bytes], environ: Mapping[bytes, bytes], mask: Collection[int], waiting: int
) -> int:
    """Become the script, or return the exit status if that fails."""
    os.setpgid(0, 0)
    if not os.read(waiting, 1):
        return 1  # the supervisor was killed first
    for number in _CHANGED_BY_PYTHON:
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execve(argv[0], argv, environ)  # noqa: S606 - as Slurm would
    except OSError as err:
        # The words and the exit status of slurmstepd.
        interpreter = os.fsdecode(argv[0])
        print(f"slurm-health: execve(): {interpreter}: {err.strerror}", file=sys.stderr, flush=True)
        return err.errno or 1


GRACE_S = 5.0  # between SIGTERM, for which a script may have a trap, and SIGKILL
_STEPS_S = 40.0  # for Slurm to end the steps; a node that does not answer takes longer
_POLL_S = 0.1


def end_script(pid: int, grace_s: float = GRACE_S) -> None:
    """End the script, our child that leads a group, and all its descendants.

    Only processes that hang in the kernel, or detached themselves before, are left.
    """
    known = tree_of(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    until_s = time.monotonic() + grace_s
    while _alive(known) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        known = tree_of(pid, known)
    until_s = time.monotonic() + grace_s
    while (alive := _alive(known)) and time.monotonic() < until_s:
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)
        known = tree_of(pid, known)


def end_steps(environ: Mapping[bytes, bytes], mask: Collection[int]) -> None:
    """End the script's steps, within a time limit, in a child with `mask`."""
    child = fork(lambda: _end_steps(as_text(environ), mask))
    until_s = time.monotonic() + _STEPS_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            say(f"the steps of the script have not ended within {_STEPS_S:g} s")
            return
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)


def _end_steps(environ: Mapping[str, str], mask: Collection[int]) -> int:
    from slurm_health.records.allocation import name_in_slurm
    from slurm_health.records.errors import SlurmError
    from slurm_health.system.slurm.client import Client  # few jobs need it

    signal.pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS & frozenset(mask))
    client = Client(environ)
    try:
        while steps := client.steps_of(name_in_slurm(environ)):
            client.kill_steps(steps)
            time.sleep(1.0)
    except SlurmError as err:
        say(f"the steps of the script could not be ended: {err}")
    return 0


def _alive(tree: Tree) -> list[int]:
    return [pid for pid, process in tree.items() if process.state not in {"Z", "X"}]
