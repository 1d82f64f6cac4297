# SPDX-License-Identifier: Apache-2.0
"""The processes that hold a lab: its keeper, its init, and one holder per node.

The keeper stays outside. It starts the init, PID 1 of the lab's process namespace, waits for its
end and removes what the lab left behind. Whoever ends the init ends every process of the lab.
The init ends by itself when the process that started the lab ends (`--watch-fd`).
"""

import argparse
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from . import directory, init, kernel
from .layout import LabSpec, read_spec
from .processes import host_pids


def main(argv: list[str]) -> None:
    """Hold one lab until it ends; started by `Lab.start`, not by hand."""
    parser = argparse.ArgumentParser(prog="tests.lab.boot")
    parser.add_argument("root", type=Path)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--watch-fd", type=int)
    options = parser.parse_args(argv)
    # The starter blocks interrupts while it starts us, and we inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    spec = read_spec(options.root)
    keep(spec, options.ready_fd, options.watch_fd)


def keep(spec: LabSpec, ready_fd: int, watch_fd: int | None) -> None:
    """Start the lab's init, report on `ready_fd`, wait for its end, and sweep.

    The report is empty when all is well, else it says what went wrong.
    """
    up_read, up_write = os.pipe()
    kernel.unshare(kernel.NEW_PID)
    init_pid = os.fork()
    if init_pid == 0:
        os.close(up_read)
        os.close(ready_fd)
        _run_init(spec, up_write, watch_fd)
    os.close(up_write)
    _end_with(init_pid)
    with os.fdopen(up_read) as pipe:
        answer = pipe.readline()
    if answer.startswith("{"):
        _write_state(spec, init_pid, json.loads(answer))
        report = ""
    else:
        report = answer or "the lab's init ended at once; see its log"
    with suppress(BrokenPipeError):
        os.write(ready_fd, report.encode())
    os.close(ready_fd)
    os.waitpid(init_pid, 0)
    directory.sweep(spec.paths.root)


def _end_with(init_pid: int) -> None:
    """Make a polite request to the keeper end the lab."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: os.kill(init_pid, signal.SIGKILL))


def _write_state(spec: LabSpec, init_pid: int, inner_pids: dict[str, int]) -> None:
    # Inside, the holders know their numbers in the lab only.
    outer = host_pids(init_pid)
    state = {
        "keeper": os.getpid(),
        "init": init_pid,
        "nodes": {node: outer[pid] for node, pid in inner_pids.items()},
    }
    draft = spec.paths.state.with_suffix(".new")
    draft.write_text(json.dumps(state))
    draft.rename(spec.paths.state)


def _run_init(spec: LabSpec, up_fd: int, watch_fd: int | None) -> NoReturn:
    """Be PID 1 of the lab: set it up, then reap until the starter ends."""
    kernel.die_with_parent(signal.SIGKILL)
    try:
        holders = init.set_up(spec)
    except BaseException as err:  # the process boundary: whatever it is, the starter is told
        traceback.print_exc()
        os.write(up_fd, " ".join(f"{type(err).__name__}: {err}".split()).encode() + b"\n")
        os._exit(1)
    signal.signal(signal.SIGCHLD, _reap)
    _reap()
    os.write(up_fd, json.dumps(holders).encode() + b"\n")
    os.close(up_fd)
    poll = select.poll()
    if watch_fd is not None:
        poll.register(watch_fd, select.POLLIN)
    # Without a starter to watch this waits for ever, and SIGKILL ends the lab.
    poll.poll()
    os._exit(0)


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
