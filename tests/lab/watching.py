# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the watchers that kill agents of a node, and strikes workers.

An order is a file; its watcher (watcher.py, inside the lab) works for as long as the file is there
and keeps a second file, `.running`, for as long as it works. No process ids are stored anywhere.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from . import processes
from .watcher import is_worker, note

if TYPE_CHECKING:
    from .inside import Inside

_WATCHER = Path(__file__).with_name("watcher.py")
_DEADLINE_S = 60


def start(lab: "Inside", node: str, *, times: int | None = None) -> None:
    """Start a watcher that kills agents on the node; it watches when this returns."""
    lab.pid(node)
    stop(lab, node)
    order = lab.paths.faults / f"{node}.kill-agent"
    order.write_text(json.dumps(times or None))
    lab.run([sys.executable, "-I", "-S", str(_WATCHER), str(order)], node=node, cwd="/")


def stop(lab: "Inside", node: str) -> None:
    order = lab.paths.faults / f"{node}.kill-agent"
    order.unlink(missing_ok=True)
    running = order.with_name(order.name + ".running")
    lab.wait_until(running.exists, lambda there: not there, f"{order.name} over", _DEADLINE_S)


def victims(lab: "Inside", node: str) -> list[str]:
    """By which fault each process of the node was met since the lab started, in order."""
    path = lab.paths.faults / f"{node}.victims"
    return path.read_text().splitlines() if path.exists() else []


def strike_workers(lab: "Inside", node: str, fault: str, signum: signal.Signals) -> None:
    """Send a signal to the probe workers that the node has at this moment."""
    for process in processes.on_node(lab.pid(node)):
        if is_worker(list(process.argv)):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signum)
                note(str(lab.paths.faults / f"{node}.{fault}"), fault)
