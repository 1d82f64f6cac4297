# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the watchers that kill or stop processes of a node.

An order is a file; its watcher (watcher.py, inside the lab) works for as long as the file is there
and keeps a second file, `.running`, for as long as it works. No process ids are stored anywhere.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import processes
from .watcher import is_worker

if TYPE_CHECKING:
    from .inside import Inside

_WATCHER = Path(__file__).with_name("watcher.py")
_DEADLINE_S = 60


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A process that a watcher has killed or stopped."""

    fault: str
    signal: str
    pid: int
    age_s: float
    argv: tuple[str, ...]


def start(
    lab: "Inside", node: str, fault: str, *, after_s: float = 0, times: int | None = None
) -> None:
    """Start a watcher on the node; it watches when this returns."""
    lab.pid(node)
    stop(lab, node, fault)
    order = lab.paths.faults / f"{node}.{fault}"
    order.write_text(json.dumps({"fault": fault, "after_s": after_s, "times": times}))
    lab.run([sys.executable, "-I", "-S", str(_WATCHER), str(order)], node=node, cwd="/")


def stop(lab: "Inside", node: str, fault: str = "*") -> None:
    """Stop the node's watchers; what they had stopped runs on when this returns."""
    for order in list(lab.paths.faults.glob(f"{node}.{fault}")):
        if order.suffix in (".running", ".victims"):
            continue
        order.unlink()
        running = order.with_name(order.name + ".running")
        lab.wait_until(running.exists, lambda there: not there, f"{order.name} over", _DEADLINE_S)


def victims(lab: "Inside", node: str) -> tuple[Victim, ...]:
    """What the node's watchers have done since the lab started, in order."""
    path = lab.paths.faults / f"{node}.victims"
    if not path.exists():
        return ()
    found = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        found.append(Victim(**{**fields, "argv": tuple(fields["argv"])}))
    return tuple(found)


def strike_workers(lab: "Inside", node: str, fault: str, signum: signal.Signals) -> None:
    """Send a signal to the probe workers that the node has at this moment."""
    for process in processes.on_node(lab.pid(node)):
        argv = list(process.argv)
        if not is_worker(argv):
            continue
        with suppress(ProcessLookupError):
            os.kill(process.pid, signum)
            _note(lab, node, fault, signum, process.pid, argv)


def _note(
    lab: "Inside", node: str, fault: str, signum: signal.Signals, pid: int, argv: list[str]
) -> None:
    victim = {"fault": fault, "signal": signum.name, "pid": pid, "age_s": 0.0, "argv": argv}
    with (lab.paths.faults / f"{node}.victims").open("a") as file:
        file.write(json.dumps(victim) + "\n")
