# SPDX-License-Identifier: Apache-2.0
"""Kills the agents of the node it runs on; a script of its own, inside the lab.

    python -I -S watcher.py ORDER

Returns once it watches, in the background, until the order is removed or fulfilled. It looks at
/proc fifty times a second, so a process may live for 20 ms before it is met.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress

_INTERVAL_S = 0.02


def is_agent(argv: list[str]) -> bool:
    """Whether this is the slurm-health agent itself, not the srun or shell that starts it."""
    if not _is_python(argv):
        return False
    for index, word in enumerate(argv[1:], 1):
        if _base(word) in ("slurm-health", "slurm_health") or "slurm_health/" in word:
            return "agent" in argv[index + 1 :]
    return False


def is_worker(argv: list[str]) -> bool:
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
    order = sys.argv[1]
    with open(order) as file:  # noqa: PTH123 - pathlib is slow to import
        left: int | None = json.load(file)
    open(order + ".running", "w").close()  # noqa: PTH123
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    here = os.readlink("/proc/self/ns/uts")  # noqa: PTH115
    met: set[tuple[str, str]] = set()
    try:
        while os.path.exists(order) and left != 0:  # noqa: PTH110
            for agent in sorted(_agents(here) - met):
                with suppress(ProcessLookupError):
                    os.kill(int(agent[0]), signal.SIGKILL)
                    met.add(agent)
                    note(order, "kill-agent")
                    left = None if left is None else left - 1
                if left == 0:
                    break
            time.sleep(_INTERVAL_S)
    finally:
        os.unlink(order + ".running")  # noqa: PTH108


def _agents(here: str) -> set[tuple[str, str]]:
    """Return the number of each agent of this node, and when it was started."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{entry}/cmdline", "rb") as file:  # noqa: PTH123
                argv = file.read().decode(errors="replace").split("\0")[:-1]
            if is_agent(argv) and os.readlink(f"/proc/{entry}/ns/uts") == here:  # noqa: PTH115
                with open(f"/proc/{entry}/stat") as stat:  # noqa: PTH123
                    found.add((entry, stat.read().rpartition(")")[2].split()[19]))
    return found


def note(order: str, fault: str) -> None:
    folder, _, name = order.rpartition("/")
    # One write of one line: two watchers of a node may share the file.
    with open(f"{folder}/{name.partition('.')[0]}.victims", "a") as file:  # noqa: PTH123
        file.write(f"{fault}\n")


if __name__ == "__main__":
    main()
