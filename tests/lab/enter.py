# SPDX-License-Identifier: Apache-2.0
"""Runs a command inside a lab, as `docker exec` would; a script of its own, started by path.

    python -I -S enter.py '{"pid": 123, "uid": 4242, ...}' command argument...

Standard streams and exit status pass through. Signals sent to this process reach the command;
those a terminal sends to the whole foreground group reach it anyhow, and are not sent twice
(two interrupts within a second would make srun give up its job). The command is killed when this
process is.
"""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PR_SET_PDEATHSIG = 1
_FROM_KERNEL = 0x80  # SI_KERNEL
_FORWARDED = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def main() -> None:
    """Enter, run, and end the way the command ended."""
    where: dict[str, Any] = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        target = os.pidfd_open(where["pid"])
    except OSError:
        sys.exit("the lab is gone")
    if libc.setns(target, _NAMESPACES) != 0:
        sys.exit(f"cannot enter the lab: {os.strerror(ctypes.get_errno())}")
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        _become(libc, where, argv)
    _end_like(_wait_forwarding(child))


def _become(libc: ctypes.CDLL, where: dict[str, Any], argv: list[str]) -> NoReturn:
    status = 127
    try:
        # Only the command, not the process outside, which may outlive the lab for a moment.
        if where["cgroup"]:
            with open(where["cgroup"], "w") as procs:  # noqa: PTH123 - pathlib costs 10 ms here
                procs.write("0")
        os.setgroups(where["groups"])
        os.setgid(where["gid"])
        os.setuid(where["uid"])
        # After setuid, which clears it.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.chdir(where["cwd"])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe(argv[0], argv, where["env"])
    except FileNotFoundError as err:
        print(f"{err.filename or argv[0]}: not found in the lab", file=sys.stderr)
    except OSError as err:
        print(f"{err.filename or argv[0]}: {err.strerror}", file=sys.stderr)
        status = 126
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_forwarding(child: int) -> int:
    while True:
        info = signal.sigwaitinfo(_FORWARDED | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            if info.si_code != _FROM_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(child, info.si_signo)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return status


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
