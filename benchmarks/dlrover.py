# SPDX-License-Identifier: Apache-2.0
"""DLRover's own node check on one machine, timed like ours: from its start to its verdict.

`python -m benchmarks check --dlrover VENV` shows it beside ours. VENV is an environment with
`dlrover` and `torch`, not below /mnt. Its local master and one `dlrover-run` per node run as their
documentation says. DLRover uses fixed paths and kills processes
that it takes for orphans, so every node has its own mounts and process ids, and all share a private
network that has only a loopback. When the first process of these namespaces ends, everything ends.

The time runs from the start of the nodes, with the master already listening, to the line in which
the master states each node's status after the last round, before any node has received it.
"""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HEALTHY_DEADLINE_S = 180.0
FAULT_DEADLINE_S = 600.0
PORT = 23456
_ROUNDS = 2  # it looks again at what failed, once
_STATUS = re.compile(r"node status are: (\{[^}]*\})")
_STARTED = "bench: nodes started"

_NODE = f"""
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm || exit
mkdir -p "$VENV" && mount --bind /mnt/venv "$VENV" || exit
cd /tmp && echo pass > train.py
if [ "$1" = "$CRASHING" ]; then
    mkdir fault && export PYTHONPATH=/tmp/fault
    echo 'import os, sys' > fault/sitecustomize.py
    echo 'if any("node_check" in word for word in sys.orig_argv): os._exit(1)' \
        >> fault/sitecustomize.py
fi
export POD_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NODE_RANK="$1" NODE_ID="$1" NODE_NUM="$NODES"
export DLROVER_MASTER_ADDR=127.0.0.1:{PORT} ELASTIC_JOB_NAME=bench POD_NAME="node$1"
"$VENV/bin/dlrover-run" --network-check --nnodes="$NODES" --nproc-per-node=1 train.py
exit $?  # keeps this shell: its children must not become children of process 1
"""

_SCENE = f"""
ip link set lo up && mount -t tmpfs tmpfs /mnt || exit
mkdir /mnt/venv && mount --bind "$VENV" /mnt/venv || exit
mount -t tmpfs tmpfs /tmp && mkdir -p "$VENV" && mount --bind /mnt/venv "$VENV" || exit
cd /tmp
"$VENV/bin/python" -u -m dlrover.python.master.main --platform local --node_num "$NODES" \
    --port {PORT} --job_name bench &
until grep -q ':{PORT:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do
    kill -0 $! || exit
    sleep 0.1
done
echo '{_STARTED}'
rank=0
while [ $rank -lt "$NODES" ]; do
    unshare --mount --pid --fork --kill-child --mount-proc sh -c "$NODE" node $rank \
        2>&1 | sed -u "s/^/node $rank: /" &
    rank=$((rank + 1))
done
wait
"""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """How many nodes, and on which of them the check process crashes at its start."""

    nodes: int
    crashing: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to: the time to the verdict, and the nodes that it calls faulty."""

    elapsed_s: float
    faulty: tuple[int, ...]
    right: bool


class Unmeasured(Exception):
    """DLRover came to no verdict in time, or could not start; with the end of what it said."""

    def __init__(self, why: str, said: str) -> None:
        self.why, self.said = why, said
        super().__init__(f"{why}; it said last: {said!r}")


def unusable(venv: Path) -> str | None:
    """Why DLRover cannot be measured with this environment; None if it can."""
    if os.geteuid() != 0:
        return "measuring DLRover needs root (it makes namespaces)"
    if not (venv / "bin" / "dlrover-run").exists():
        return f"{venv} has no dlrover-run: it is not an environment with the dlrover package"
    return None


def measure(venv: Path, scene: Scene) -> Outcome:
    """Run its check once.

    Raises:
        Unmeasured: no verdict within the deadline.
    """
    deadline_s = HEALTHY_DEADLINE_S if scene.crashing is None else FAULT_DEADLINE_S
    process = _start(venv, scene)
    try:
        return _await_verdict(process, scene, deadline_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(venv: Path, scene: Scene) -> subprocess.Popen[bytes]:
    namespaces = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        ["unshare", *namespaces, "sh", "-c", _SCENE],
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",
            "VENV": str(venv.absolute()),
            "NODES": str(scene.nodes),
            "CRASHING": "" if scene.crashing is None else str(scene.crashing),
            "NODE": _NODE,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _await_verdict(process: subprocess.Popen[bytes], scene: Scene, deadline_s: float) -> Outcome:
    said: deque[str] = deque(maxlen=5)
    started_s: float | None = None
    rounds = 0
    for line in _lines(process, time.monotonic() + deadline_s):
        said.append(line)
        if line == _STARTED:
            started_s = time.monotonic()
        found = _STATUS.search(line)
        if found is None or started_s is None:
            continue
        rounds += 1
        passed: dict[int, bool] = ast.literal_eval(found.group(1))
        if all(passed.values()) or rounds == _ROUNDS:
            faulty = tuple(sorted(node for node, well in passed.items() if not well))
            expected = () if scene.crashing is None else (scene.crashing,)
            return Outcome(
                elapsed_s=time.monotonic() - started_s, faulty=faulty, right=faulty == expected
            )
    why = "it ended" if process.poll() is not None else f"no verdict within {deadline_s:g} s"
    raise Unmeasured(why, "\n".join(said))


def _lines(process: subprocess.Popen[bytes], until_s: float) -> Iterator[str]:
    """Give each line as it comes, until the end of the output or of the time."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            process.wait()
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
