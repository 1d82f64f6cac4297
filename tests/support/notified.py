# SPDX-License-Identifier: Apache-2.0
"""The events that a node's `[notify]` command has received, once all of them have been sent."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from slurm_health.node.notify import EventKind
from slurm_health.system.proc import stat
from tests.support.hooked_node import Node

_ORDER = list(EventKind)


class Received(msgspec.Struct):
    """What a command reads."""

    version: int
    source: str
    cluster: str
    time: str
    summary: str
    kind: EventKind
    node: str
    time_s: float
    text: str
    checks: tuple[str, ...] = ()
    job: int = 0
    evidence: tuple[str, ...] = ()


def into_file(node: Node) -> str:
    """Return the settings by which a node's events are added to a file of its own."""
    return f"[notify]\ncluster = 'c1'\ncommand = ['sh', '-c', 'cat >>{node.directory}/events']\n"


def received(node: Node) -> list[Received]:
    """Return the events of a node in the order in which they happened."""
    wait_for_senders()
    path = node.directory / "events"
    lines = path.read_bytes().splitlines() if path.exists() else []
    events = [msgspec.json.decode(line, type=Received) for line in lines]
    return sorted(events, key=lambda event: (event.time_s, _ORDER.index(event.kind)))


def wait_for_senders() -> None:
    """Wait for the processes that hooks of this test have started and do not wait for."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if stat(path).parent != os.getpid():
                continue
            # While the kernel executes a program, it has no command line yet; nor at its end.
            while not (words := (path / "cmdline").read_bytes()) and stat(path).state != "Z":
                time.sleep(0.001)
            if b"slurm_health.node.notify" in words:
                os.waitpid(int(path.name), 0)
