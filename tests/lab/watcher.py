# SPDX-License-Identifier: Apache-2.0
"""Kills or stops chosen processes of the node it runs on; a script of its own, inside the lab.

    python -I -S watcher.py ORDER

Returns once it watches, in the background, until the order is removed or fulfilled. It looks at
/proc fifty times a second, so a process may live for 20 ms before it is met.
"""

import json
import os
import signal
import sys
import time
from typing import Any

_INTERVAL_S = 0.02
_SIGNALS = {
    "kill-agent": signal.SIGKILL,
    "crash-worker": signal.SIGKILL,
    "hang-worker": signal.SIGSTOP,
}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def is_agent(argv: list[str]) -> bool:
    """Whether this is the slurm-health agent itself, not the srun or shell that starts it."""
    if not _is_python(argv):
        return False
    for index, word in enumerate(argv[1:], 1):
        if _base(word) in ("slurm-health", "slurm_health") or "slurm_health/" in word:
            return "agent" in argv[index + 1 :]
    return False


def is_worker(argv: list[str]) -> bool:
    """Whether this is a probe worker."""
    return _is_python(argv) and any(
        word == "slurm_health.preflight.probes.worker"
        or word.endswith("preflight/probes/worker.py")
        for word in argv[1:]
    )


def _is_python(argv: list[str]) -> bool:
    return bool(argv) and _base(argv[0]).startswith("python")


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def main() -> None:
    """Watch as ordered."""
    order_path = sys.argv[1]
    with open(order_path) as file:  # noqa: PTH123 - pathlib is slow to import
        order: dict[str, Any] = json.load(file)
    open(order_path + ".running", "w").close()  # noqa: PTH123
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    stopped: list[int] = []
    try:
        _watch(order_path, order, stopped)
    finally:
        for pid in stopped:
            _send(pid, signal.SIGCONT)
        os.unlink(order_path + ".running")  # noqa: PTH108


def _watch(order_path: str, order: dict[str, Any], stopped: list[int]) -> None:
    matches = is_agent if order["fault"] == "kill-agent" else is_worker
    signum = _SIGNALS[order["fault"]]
    left = order["times"]
    done: set[tuple[int, float]] = set()
    here = os.readlink("/proc/self/ns/uts")  # noqa: PTH115
    while os.path.exists(order_path):  # noqa: PTH110
        for pid, started_s in _processes(here, matches):
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
            if (pid, started_s) in done or age_s < order["after_s"] or left == 0:
                continue
            if _send(pid, signum):
                done.add((pid, started_s))
                left = None if left is None else left - 1
                if signum == signal.SIGSTOP:
                    stopped.append(pid)
                note(order_path, order["fault"])
        # Stopped processes are to run on when the order is removed, not before.
        if left == 0 and not stopped:
            return
        time.sleep(_INTERVAL_S)


def _processes(here: str, matches: Any) -> list[tuple[int, float]]:
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:  # noqa: PTH123
                argv = file.read().decode(errors="replace").split("\0")[:-1]
            with open(f"/proc/{entry}/stat") as stat:  # noqa: PTH123
                fields = stat.read().rpartition(")")[2].split()
            if not matches(argv):
                continue
            if os.readlink(f"/proc/{entry}/ns/uts") != here:  # noqa: PTH115
                continue
        except OSError:  # it ended meanwhile
            continue
        found.append((int(entry), int(fields[19]) / _TICKS_PER_S))
    return sorted(found)


def _send(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def note(order_path: str, fault: str) -> None:
    """Note beside the order that it has met a process."""
    folder, _, name = order_path.rpartition("/")
    # One write of one line: two watchers of a node may share the file.
    with open(f"{folder}/{name.partition('.')[0]}.victims", "a") as file:  # noqa: PTH123
        file.write(f"{fault}\n")


if __name__ == "__main__":
    main()
