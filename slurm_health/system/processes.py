# SPDX-License-Identifier: Apache-2.0
"""The one place where processes are started and ended.

Most live in a session of their own and die with this process. Elsewhere only `killable` forks: a
hook has no time to load this module. Commands of probes and checks end with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pwd
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from slurm_health.records.text import one_line
from slurm_health.system import SYSTEM_PATH
from slurm_health.system.signals import signals_delayed

Process = subprocess.Popen[bytes]
PIPE, NOTHING = subprocess.PIPE, subprocess.DEVNULL
"""Values for a standard stream of a child; None is our own."""

_PR_SET_PDEATHSIG = 1
_REAP_S = 2.0  # a killed process ends within milliseconds, on a busy machine later
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that would end us
_MOST_FILES = 1024  # that we have open
_SHOWN = 300  # of the end of a command's output: a test of hours may print all the while
_libc = ctypes.CDLL(None, use_errno=True)


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command, with its output."""

    returncode: int
    stdout: bytes
    stderr: bytes


def die_with_parent(
    signal_number: int = signal.SIGKILL, parent: int | None = None
) -> Callable[[], None]:
    """Return a function for a child: the kernel signals it when its parent, this process, dies.

    A child of another process calls it itself, with its `parent`.
    """
    parent = parent or os.getpid()

    def tie() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return tie


def fork(work: Callable[[], int]) -> int:
    """Run a function in a child, which exits with the code that it returns; return its id.

    Raises:
        OSError: the limit of processes is reached.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = work()
    finally:
        os._exit(code)


def start_tied(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | Mapping[bytes, bytes],
    stdin: int | None = NOTHING,
    stdout: int | None = NOTHING,
    stderr: int | None = PIPE,
    signal_mask: Collection[int] | None = None,
    on_our_death: int = signal.SIGKILL,
) -> Process:
    """Start a child in its own session that dies with this process, by the signal `on_our_death`.

    Reading from it never blocks. It has our signal mask, or the given one.

    Raises:
        OSError: it cannot be executed, or not be tied.
    """
    tie = die_with_parent(on_our_death)
    # Python drops an exception of a signal handler during a fork, and with it the user's Ctrl-C.
    with signals_delayed() as ours:
        mask = ours if signal_mask is None else signal_mask

        def prepare() -> None:
            tie()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            process = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environ,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - callers start children from one thread
            )
        except subprocess.SubprocessError as err:
            raise OSError(str(err)) from err
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


def fork_tied(work: Callable[[], int]) -> Process:
    """Run a function in a child, with pipes and a session as those of `start_tied`.

    It shares our memory, as far as neither of us changes it.

    Raises:
        OSError: the limit of processes is reached.
    """
    tie = die_with_parent()

    def instead_of_a_command() -> None:
        tie()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.closerange(3, _MOST_FILES)  # subprocess waits until one of them is closed
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)

    gc.freeze()  # a collection would change it
    with signals_delayed():
        process = subprocess.Popen(
            [sys.executable],
            stdin=PIPE,
            stdout=PIPE,
            stderr=NOTHING,
            start_new_session=True,
            restore_signals=False,  # they are for another program: Python ignores SIGPIPE
            preexec_fn=instead_of_a_command,  # noqa: PLW1509 - callers have one thread
        )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def read_available(pipe: IO[bytes] | None) -> bytes:
    """Return the bytes that have arrived on a pipe of `start_tied`, without waiting."""
    assert pipe is not None
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe.fileno(), 65536):
            data += chunk
    return data


def kill_session(process: Process, signal_number: int = signal.SIGKILL) -> None:
    """Signal a child that leads a session, and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)


def ends_within(process: Process, wait_s: float) -> bool:
    """Wait for the end of a child; return whether it came in time."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def abandon_session(process: Process, *, wait_s: float) -> bool:
    """Kill a child and its group, reap it unless the kernel holds it; return whether it ended."""
    kill_session(process)
    close_pipes(process)
    return ends_within(process, wait_s)


def end_session(process: Process, *, leave_s: float = 0.0, grace_s: float) -> None:
    """End a child and its group, and reap it, as `end_sessions` does."""
    end_sessions([process], leave_s=leave_s, grace_s=grace_s)


def end_sessions(
    children: Sequence[Process], *, leave_s: float = 0.0, grace_s: float
) -> list[Process]:
    """End children and their groups, and reap them; return those that did not exit by themselves.

    They may exit within `leave_s`; then they are terminated, and killed after `grace_s`.
    """
    late = _not_ended_within(children, leave_s)
    for process in late:
        kill_session(process, signal.SIGTERM)
    _not_ended_within(late, grace_s)
    for process in children:
        # Even if the leader is gone: others of its group may have ignored the first signal.
        kill_session(process, signal.SIGKILL)
        process.wait()
        close_pipes(process)
    return late


def _not_ended_within(children: Sequence[Process], wait_s: float) -> list[Process]:
    until_s = time.monotonic() + wait_s
    return [
        child for child in children if not ends_within(child, max(0.0, until_s - time.monotonic()))
    ]


def close_pipes(process: Process) -> None:
    """Close our ends of a child's pipes."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def run(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    deadline_s: float,
    stdin: bytes = b"",
    directory: Path | None = None,
    last_bytes: int | None = None,
    user: str | None = None,
) -> CommandResult:
    """Run a command in a session of its own to its end; no process of it is left.

    At the deadline, or if we are interrupted, the session is killed; only a process that the kernel
    holds is left behind. `last_bytes` of a stream are kept; None for all: a site's command may
    print more than there is memory. With `user`, root runs it as that user.

    Raises:
        TimeoutError: it did not end in time.
        OSError: it cannot be executed.
        KeyError: there is no such user.
    """
    account = pwd.getpwnam(user) if user is not None else None
    groups = os.getgrouplist(account.pw_name, account.pw_gid) if account else None
    process = subprocess.Popen(
        list(argv),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=dict(environ),
        cwd=directory,
        start_new_session=True,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=groups,
    )
    until_s = time.monotonic() + deadline_s
    try:
        stdout, stderr = _exchange(process, stdin, until_s, last_bytes)
        process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        abandon_session(process, wait_s=_REAP_S)
    return CommandResult(returncode=process.returncode, stdout=stdout, stderr=stderr)


class CommandFailed(Exception):
    """A command of the site failed, or could not be run; the text says how."""


def run_for_site(
    argv: Sequence[str],
    limit_s: float,
    *,
    stdin: bytes = b"",
    environ: Mapping[str, str] | None = None,
    user: str | None = None,
) -> str:
    """Run a command that the site has chosen, as root or as `user`; return the end of its output.

    Raises:
        CommandFailed: it cannot be run, did not end in time, or exited with another code than 0.
    """
    try:
        ended = run(
            argv,
            environ={"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/root", **(environ or {})},
            deadline_s=limit_s,
            stdin=stdin,
            directory=Path("/"),
            last_bytes=_SHOWN,
            user=user,
        )
    except TimeoutError:
        raise CommandFailed(f"{argv[0]} did not end within {limit_s:g} s") from None
    except OSError as err:
        raise CommandFailed(f"{argv[0]} cannot be run: {err.strerror}") from err
    except KeyError:
        raise CommandFailed(f"there is no user {user}") from None
    # Tests print what is wrong at the end.
    output = one_line((ended.stdout + ended.stderr).decode(errors="replace"))[-_SHOWN:]
    if ended.returncode:
        shown = f": {output}" if output else ""
        raise CommandFailed(f"{argv[0]} exited with code {ended.returncode}{shown}")
    return output


def _exchange(
    process: Process, data: bytes, until_s: float, last_bytes: int | None
) -> tuple[bytes, bytes]:
    """Write to a child and read its output until it closes both streams.

    Raises:
        TimeoutError: a stream was still open at `until_s`.
    """
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    left = memoryview(data)
    output = {stdout.fileno(): bytearray(), stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as pipes:
        pipes.register(stdin, selectors.EVENT_WRITE)
        for pipe in output:
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map():
            if (wait_s := until_s - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in pipes.select(wait_s):
                if key.fileobj is stdin:
                    try:  # a pipe that is ready takes so much without blocking
                        left = left[os.write(key.fd, left[: select.PIPE_BUF]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        pipes.unregister(stdin)
                        stdin.close()
                elif chunk := os.read(key.fd, 65536):
                    output[key.fd] += chunk
                    if last_bytes is not None:
                        del output[key.fd][:-last_bytes]
                else:
                    pipes.unregister(key.fd)
    return bytes(output[stdout.fileno()]), bytes(output[stderr.fileno()])


def ask_python(
    python: str, question: str, *, environ: Mapping[str, str], deadline_s: float
) -> CommandResult:
    """Run a line of Python with an interpreter of a job or of a site.

    It runs in the root directory: the caller's own may hold another user's `torch.py`, and an empty
    entry of PYTHONPATH means it. -P and -I do not work here: Python 3.10 has no -P, and a job's
    torch may lie in PYTHONPATH.

    Raises:
        TimeoutError: it did not answer in time.
        OSError: it cannot be executed.
    """
    # Python detects a venv by the link, which is not resolved.
    path = os.path.abspath(python) if "/" in python else python  # noqa: PTH100
    return run([path, "-c", question], environ=environ, deadline_s=deadline_s, directory=Path("/"))


def run_in_foreground(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: bytes | None = None,
    output: IO[bytes] | None = None,
    deadline_s: float | None = None,
) -> int:
    """Run a command with our streams and open files; return its code, 128+n after signal n.

    `stdin` replaces our own standard input, `output` our own standard output and error. Signals
    that would end us are forwarded to it, and we end when it does, so that no process of ours is
    left behind.

    Raises:
        TimeoutError: it did not end in time, and was killed.
        OSError: it cannot be executed.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=None if stdin is None else PIPE,
        stdout=output,
        stderr=output,
        env=dict(environ),
        close_fds=False,  # its arguments may name one of our files by its number
    )
    previous = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        process.communicate(stdin, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


# The variables that a detached command inherits: where Slurm is, and our name there.
_KEPT = ("PATH", "SLURM_CONF", "SLURMD_NODENAME")


def start_detached(argv: Sequence[str], environ: Mapping[str, str], *, stdin: bytes = b"") -> None:
    """Start a command without waiting for it: in a session of its own, with none of our files.

    It inherits only the variables that it needs to find Slurm. `stdin` is its whole input.

    Raises:
        OSError: it cannot be executed.
    """
    with os.fdopen(os.memfd_create("stdin"), "w+b") as memory:  # a full pipe would block us
        memory.write(stdin)
        memory.seek(0)
        subprocess.Popen(
            list(argv),
            stdin=memory if stdin else NOTHING,
            stdout=NOTHING,
            stderr=NOTHING,
            env={
                "PATH": os.defpath,
                "LC_ALL": "C.UTF-8",
                **{name: environ[name] for name in _KEPT if name in environ},
            },
            cwd="/",
            start_new_session=True,
        ).returncode = 0  # it is not ours to wait for, and Python must not warn about it


def own_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line of this slurm-health, for another process or node.

    `-P` keeps the working directory off the module path: it may hold a `click.py` of the user's.
    """
    return own_module("slurm_health", *arguments)


def own_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command line that runs a module of ours with this interpreter."""
    return (*own_python(), "-m", module, *arguments)


def own_python() -> tuple[str, ...]:
    """Return the command line of this interpreter, for another process of ours."""
    # If we were started without PYTHONPATH and PYTHONHOME, values of the child's belong to another
    # Python.
    unused = sys.flags.ignore_environment or not {"PYTHONPATH", "PYTHONHOME"} & os.environ.keys()
    return (sys.executable, "-E", "-P") if unused else (sys.executable, "-P")
