# SPDX-License-Identifier: Apache-2.0
"""The user's script as a process: started as Slurm would, sent what Slurm sent only to us, ended.

The script gets a process group of its own, as slurmstepd gives a batch script one, so that its
`kill 0` ends what it started and not the supervisor. Signals that Slurm delivers to every process
of the job reach it without us; those meant for the batch script arrive at the supervisor, which
stands in its place, and are passed on. What came before the script began, while its nodes were
checked, waits until the script has made provision for it.

One whose training hangs is ended with all that it started here, and with its steps. Its interpreter
comes first, so that it does not go on with its next command once a step has ended. Ranks may be in
sessions of their own, as torchrun's are, or stopped; so all that descends from the script is
killed. Steps on other nodes outlive an srun that is killed, and Slurm ends them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.supervisor.recorder import say
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS, WINDOW_S, Sentinel
from slurm_health.system import proc
from slurm_health.system.processes import fork
from slurm_health.system.signals import FOR_SCRIPT

# What Python changes at its start; everything else is as it was given to us.
_CHANGED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
# All that follows the interpreter is one argument, whatever blanks are in it.
_INTERPRETER_LINE = re.compile(rb"#![ \t]*([^ \t]+)[ \t]*(.*?)[ \t]*$", re.DOTALL)
# How long a script may take to set its trap: as long as modules and interpreters from a cold
# network filesystem take (`master.job_environment.DEADLINE_S`).
TRAP_WAIT_S = 120.0
# A trap counts once it is there at two looks: a shell that sets one on EXIT catches all signals
# before it comes to the next line, which says what to do about this one.
_LOOK_S = 0.25
_MASK = re.compile(rb"^Sig(Blk|Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)
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
        trap_wait_s: float = TRAP_WAIT_S,
    ) -> None:
        """Start it with this environment and signal mask, and all else as it was given to us.

        `early` holds those of `FOR_SCRIPT` that are pending: they came before it, and are sent when
        it has a trap for them, or after `trap_wait_s`, when it ends by them as it would have.
        `told` holds the signals that came while it ran, from wherever and however.
        """
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
        self.early = FOR_SCRIPT & signal.sigpending()
        for number in self.early:
            while signal.sigtimedwait({number}, 0):  # real-time signals queue
                pass
        self._early = _Early(self.pid, self.early, trap_wait_s)
        self.told: set[int] = set()
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
                self._early.send_those_expected()
                info = self._next_signal()
                if info is None:
                    continue
                if info.si_signo == signal.SIGCHLD:
                    on_child()
                else:
                    self._route(info.si_signo, info.si_pid)
        finally:
            self._inside.end()
            self._beside.end()

    def _next_signal(self) -> signal.struct_siginfo | None:
        """Wait for a signal; no longer than until the next look for a trap, where that is due."""
        if self._early.left:
            return signal.sigtimedwait(ALL_SIGNALS, _LOOK_S)
        return signal.sigwaitinfo(ALL_SIGNALS)

    def _route(self, number: int, sender: int) -> None:
        """Deliver a signal to whom it would have reached had the script been in our place."""
        self.told.add(number)
        if self._inside.heard(number, sender, wait_s=WINDOW_S):
            return  # sent to every process of the job: the script has it
        send = os.killpg if self._beside.heard(number, sender) else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(self.pid, number)


class _Early:
    """Signals that came before the script began, until it is sent them."""

    def __init__(self, pid: int, numbers: Collection[int], wait_s: float) -> None:
        self._pid = pid
        self._until_s = time.monotonic() + wait_s
        self._seen: set[int] = set()
        self.left = set(numbers)

    def send_those_expected(self) -> None:
        """Send what the script has been provided for since the last look, or all of it if late."""
        if not self.left:
            return
        late = time.monotonic() >= self._until_s
        provided = self.left & _provided_for(self._pid)
        for number in self.left.copy() if late else provided & self._seen:
            self.left.discard(number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
        self._seen = provided


def _provided_for(pid: int) -> set[int]:
    """Return the signals that a process catches, ignores or blocks; none of one that is gone.

    One that sits in `sigwait` does not show what it waits for.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return set()
    masks = {name: int(mask, 16) for name, mask in _MASK.findall(status)}
    if _numbers(masks.get(b"Blk", 0)) >= ALL_SIGNALS:
        return set()  # it is a child of ours, and not the script yet
    return _numbers(functools.reduce(operator.or_, masks.values(), 0))


def _numbers(mask: int) -> set[int]:
    return {number for number in ALL_SIGNALS if mask >> (number - 1) & 1}


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


GRACE_S = 5.0  # between SIGTERM, for which a script may have a trap, and SIGKILL
_STEPS_S = 40.0  # for Slurm to end the steps; a node that does not answer takes longer
_POLL_S = 0.1

_Known = dict[int, int]
"""Processes, and when each was started: that tells it from a later one of the same number."""


def end_script(pid: int, grace_s: float = GRACE_S) -> None:
    """End the script, a child that is still to be waited for and leads a group, and all below it.

    None of it is left but what hangs in the kernel, or has cut itself off from it before.
    """
    known = _below(pid, {})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    until_s = time.monotonic() + grace_s
    while _alive(known) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        known = _below(pid, known)
    until_s = time.monotonic() + grace_s
    while (alive := _alive(known)) and time.monotonic() < until_s:
        for each in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)
        known = _below(pid, known)


def end_steps(environ: Mapping[bytes, bytes], mask: Collection[int]) -> None:
    """End the job's steps that are the script's; not for long, and in a child with `mask`."""
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    child = fork(lambda: _end_steps(text, mask))
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
    from slurm_health.system.slurm.client import Client  # needed by few jobs

    signal.pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS & frozenset(mask))
    client = Client(environ)
    try:
        while steps := client.steps_of(name_in_slurm(environ)):
            client.kill_steps(steps)
            time.sleep(1.0)
    except SlurmError as err:
        say(f"the steps of the script could not be ended: {err}")
    return 0


def _below(pid: int, known: _Known) -> _Known:
    """Return the processes that were known, and all that descend from them or from the script."""
    children: dict[int, list[proc.Stat]] = {}
    found: _Known = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            each = proc.stat(process)
            children.setdefault(each.parent, []).append(each)
            if each.pid == pid or known.get(each.pid) == each.start_ticks:
                found[each.pid] = each.start_ticks
    queue = list(found)
    while queue:
        for each in children.get(queue.pop(), ()):
            if each.pid not in found:
                found[each.pid] = each.start_ticks
                queue.append(each.pid)
    return found


def _alive(known: _Known) -> list[int]:
    alive = []
    for pid, start_ticks in known.items():
        with contextlib.suppress(OSError, ValueError):
            now = proc.stat(Path(f"/proc/{pid}"))
            if now.start_ticks == start_ticks and now.state not in {"Z", "X"}:
                alive.append(pid)
    return alive
