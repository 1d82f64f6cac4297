# SPDX-License-Identifier: Apache-2.0
"""What is done to nodes of the lab from outside; the script does the other faults to itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.diagnosis.plan import Plan
from tests.lab import Lab, LabError
from tests.lab.layout import CHECKOUT

# Where many processes share the cores, a well node has no more than a tenth of one either.
SLOW_MBIT, STARVED_SHARE = 20.0, 0.04
_LOCAL = Path("/tmp/diagnosis")  # of a node of the lab, as training.py knows it
_DISK, _DATA = _LOCAL / "checkpoint", _LOCAL / "data"
_DISK_BYTES = 6 << 20  # two checkpoints, and a little more


def lay_out(directory: Path) -> None:
    """Lay out what the training reads and writes on a node, in the node's /tmp."""
    local = directory / _LOCAL.name
    shutil.rmtree(local, ignore_errors=True)
    (local / _DATA.name).mkdir(parents=True)
    (local / _DATA.name / "batch").write_bytes(bytes(4096))
    (local / _DISK.name).mkdir()
    (local / _DISK.name).chmod(0o777)


def before(lab: Lab, plan: Plan, mending: ExitStack) -> None:
    """Prepare a node before the job begins: a small disk of its own, where that is to be full."""
    if plan.cause.name == "disk":
        options = f"size={_DISK_BYTES},mode=1777"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(_DISK)]
        lab.run(mount, node=plan.node)
        mending.callback(lab.run, ["umount", "-l", str(_DISK)], node=plan.node, check=False)


def now(lab: Lab, plan: Plan, mending: ExitStack) -> None:
    """Let the fault happen. What `lab.reset` does not undo, `mending` does.

    Raises:
        LabError: it could not be done.
    """
    node = plan.node
    match plan.cause.name:
        case "drop":
            lab.fault.drop(node)
        case "lost":
            lab.fault.drop(node, everything=True)
        case "slurmd":
            lab.fault.kill_slurmd(node)
        case "link":
            lab.fault.slow_link(node, SLOW_MBIT)
        case "starved":
            lab.fault.starve_cpu(node, STARVED_SHARE)
        case "disk":
            fill = ["dd", "if=/dev/zero", f"of={_DISK}/full", "bs=64k"]
            lab.run(fill, node=node, check=False)  # until there is no space left
        case "mount":
            _hang_mount(lab, node, mending)
        case other:
            raise LabError(f"nothing is done to a node for {other}")


def _hang_mount(lab: Lab, node: str, mending: ExitStack) -> None:
    """Mount what never answers over the data of a node."""
    argv = [sys.executable, "-m", "benchmarks.diagnosis.hung_mount", str(_DATA)]
    process = lab.popen(argv, node=node, cwd=CHECKOUT, stdout=subprocess.PIPE)
    mending.callback(lab.run, ["umount", "-l", str(_DATA)], node=node, check=False)
    mending.callback(process.wait)
    mending.callback(process.kill)  # its readers get an error, and may end
    assert process.stdout is not None
    if not process.stdout.readline():
        raise LabError(f"no filesystem could be mounted on {node}")
