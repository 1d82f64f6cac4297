# SPDX-License-Identifier: Apache-2.0
"""Faults of a lab's network filesystem, and what a check of storage has to say of each."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import processes
from .installed_site import COMMAND
from .lab import Lab
from .layout import CHECKOUT

NODES, SIZE_MB = 5, 256
FREED_S = 20.0  # until what the kernel held is gone
_SLOW_MBIT = 20.0  # the large file, of 8 MB, takes 3.2 s
_DEADLINE_S = 120.0
_FAILING = CHECKOUT / "tests" / "lab" / "failing_filesystem.py"
Fault = Callable[[Lab, str], contextlib.AbstractContextManager[None]]


def directory(lab: Lab) -> str:
    """Return alice's directory on the volume, which the checks test."""
    return f"{lab.paths.shared}/alice"


def prepare(lab: Lab) -> None:
    """Make what the checks test, and what a node with a stale directory has instead."""
    for name in ("alice", "stale"):
        lab.run(["install", "-d", "-o", "alice", "-g", "alice", f"{lab.paths.shared}/{name}"])


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    assert pids
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _clients(lab: Lab, node: str) -> list[int]:
    return [each.pid for each in processes.on_node(lab.pid(node)) if each.name == "glusterfs"]


def _servers(lab: Lab) -> list[int]:
    return [each.pid for each in processes.on_node(lab.pid()) if each.name == "glusterfsd"]


@contextlib.contextmanager
def _mounted(lab: Lab, node: str, error: str) -> Iterator[None]:
    """Have alice's directory fail on a node with an error, or hang."""
    point = directory(lab)
    argv = [sys.executable, str(_FAILING), point, error]
    server = lab.popen(argv, node=node, stdout=-1)
    assert server.stdout is not None
    assert server.stdout.readline() == b"mounted\n"
    try:
        yield
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        lab.run(["umount", "--lazy", point], node=node)


@contextlib.contextmanager
def slow_client(lab: Lab, node: str) -> Iterator[None]:
    """Slow a node's link down."""
    lab.fault.slow_link(node, mbit=_SLOW_MBIT)
    try:
        yield
    finally:
        lab.fault.clear(node)


def hung_client(lab: Lab, node: str) -> contextlib.AbstractContextManager[None]:
    """Stop a node's client."""
    return _stopped(_clients(lab, node))


@contextlib.contextmanager
def dead_client(lab: Lab, node: str) -> Iterator[None]:
    """Kill a node's client: its mount answers with ENOTCONN."""
    shared = str(lab.paths.shared)
    _signal(_clients(lab, node), signal.SIGKILL)
    try:
        yield
    finally:
        lab.run(["umount", "--lazy", shared], node=node)
        lab.run(["glusterfs", f"--volfile={lab.paths.etc}/client.vol", shared], node=node)


@contextlib.contextmanager
def stale_directory(lab: Lab, node: str) -> Iterator[None]:
    """Have a node see another directory of the volume under the same name."""
    point = directory(lab)
    lab.run(["mount", "--bind", f"{lab.paths.shared}/stale", point], node=node)
    try:
        yield
    finally:
        lab.run(["umount", "--lazy", point], node=node)


@contextlib.contextmanager
def read_only(lab: Lab, node: str) -> Iterator[None]:
    """Mount the volume read-only on a node."""
    shared = str(lab.paths.shared)
    lab.run(["mount", "-i", "-o", "remount,ro", shared], node=node)  # some helpers know no remount
    try:
        yield
    finally:
        lab.run(["mount", "-i", "-o", "remount,rw", shared], node=node)


@contextlib.contextmanager
def slow_server(lab: Lab, node: str) -> Iterator[None]:
    """Slow the way of all nodes to the server down."""
    with contextlib.ExitStack() as stack:
        for name in lab.nodes:
            stack.enter_context(slow_client(lab, name))
        yield


def hung_server(lab: Lab, node: str) -> contextlib.AbstractContextManager[None]:
    """Stop the server."""
    return _stopped(_servers(lab))


@contextlib.contextmanager
def full_volume(lab: Lab, node: str) -> Iterator[None]:
    """Leave no room on the volume."""
    ballast = f"{lab.paths.root}/brick/ballast"
    fill = f"dd if=/dev/zero of={ballast} bs=64k count={SIZE_MB * 32} conv=fsync; df {ballast}"
    try:
        assert "100%" in lab.run(["sh", "-c", fill]).stdout
        yield
    finally:
        lab.run(["rm", ballast])


@contextlib.contextmanager
def quota(lab: Lab, node: str) -> Iterator[None]:
    """Let alice be over her quota, on all nodes."""
    with contextlib.ExitStack() as stack:
        for name in lab.nodes:
            stack.enter_context(_mounted(lab, name, "EDQUOT"))
        yield


def failing(error: str) -> Fault:
    """Return the fault of one node whose directory fails with an error, or hangs."""
    return lambda lab, node: _mounted(lab, node, error)


def nothing(lab: Lab, node: str) -> contextlib.AbstractContextManager[None]:
    """Leave all as it is."""
    return contextlib.nullcontext()


# By name: the fault, the level of the node it is on, if any, and whose matter it is else.
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "healthy": (nothing, "", ""),
    "slow client": (slow_client, "slow", ""),
    "hung mount": (hung_client, "faulty", ""),
    "hung mount (FUSE)": (failing("hang"), "faulty", ""),
    "evicted client (ESTALE)": (failing("ESTALE"), "faulty", ""),
    "evicted client (EIO)": (failing("EIO"), "faulty", ""),
    "evicted client (ENOTCONN)": (dead_client, "faulty", ""),
    "stale directory": (stale_directory, "faulty", ""),
    "read-only on one node": (read_only, "faulty", ""),
    "slow server": (slow_server, "", "server"),
    "hung server": (hung_server, "", "server"),
    "full volume": (full_volume, "", "user"),
    "quota": (quota, "", "user"),
}


def check(lab: Lab) -> dict[str, Any]:
    """Check the storage of all nodes; return what `check --json` says."""
    words = ["--check=storage", f"--paths={directory(lab)}", "--json"]
    argv = ["salloc", "--quiet", f"-N{len(lab.nodes)}", COMMAND, "check", *words]
    ran = lab.run(argv, user="alice", check=False, deadline_s=_DEADLINE_S)
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def wrong(document: dict[str, Any], node: str, level: str, blame: str) -> str:
    """Return what a check says that it should not, empty where it is right."""
    accused = {
        each["node"]: (each["level"], each["component"])
        for each in document["nodes"]
        if each["level"] != "healthy"
    }
    expected = {node: (level, "storage")} if level else {}
    blamed = [each["blame"] for each in document["storage"]]
    reasons = [each["reason"] for each in (*document["nodes"], *document["storage"])]
    if accused == expected and blamed == ([blame] if blame else []):
        return ""
    return f"accused {accused}, blamed {blamed}: {reasons}"


def left_over(lab: Lab) -> list[str]:
    """Name the processes of ours that are still there."""
    inside = processes.host_pids(lab.pid()).values()
    return [
        f"{pid} {processes.state(pid)}"
        for pid in inside
        if b"\0slurm_health\0" in _command(pid) or COMMAND.encode() in _command(pid)
    ]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
