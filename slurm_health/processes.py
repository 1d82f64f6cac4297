# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive their purpose: own session, tied to the parent, killable."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn` after which the kernel signals the child when its parent dies."""
    parent = os.getpid()

    def tie() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return tie


def start_tied(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a child in its own session that dies with this process.

    Its standard error, and its standard output where it is a pipe, never block a reader.

    Raises:
        OSError: it cannot be executed.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=dict(environ),
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 - callers start children from one thread
    )
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
    return process


def read_available(pipe: IO[bytes] | None) -> bytes:
    """Return what has arrived on a pipe of `start_tied`, without waiting."""
    assert pipe is not None
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe.fileno(), 65536):
            data += chunk
    return data


def kill_session(process: subprocess.Popen[bytes], signal_number: int = signal.SIGKILL) -> None:
    """Signal a child started with `start_new_session=True` and all that is in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)


def abandon_session(process: subprocess.Popen[bytes], *, wait_s: float) -> bool:
    """Kill a child and its group, and reap it unless it hangs in the kernel; tell if it ended."""
    kill_session(process)
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_session(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a child and its group: terminate, wait at most `grace_s`, kill, reap."""
    if process.poll() is None:
        kill_session(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    # Even when the leader is gone: others of its group may have ignored the first signal.
    kill_session(process, signal.SIGKILL)
    process.wait()


def exit_text(returncode: int) -> str:
    """Say how a process ended: `exit code 3`, or `killed by SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal_name(-returncode)}"


def signal_name(number: int) -> str:
    """Return `SIGSEGV`, or `signal 40` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def own_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line of this slurm-health, for another process or node.

    `-P` keeps the working directory off the module path: it may hold a `click.py` of the user's.
    """
    return own_module("slurm_health", *arguments)


def own_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command line that runs a module of ours with this interpreter."""
    # Where we were started without PYTHONPATH and PYTHONHOME, they belong to another Python.
    flags = ("-E", "-P") if sys.flags.ignore_environment else ("-P",)
    return (sys.executable, *flags, "-m", module, *arguments)
