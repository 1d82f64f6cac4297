# SPDX-License-Identifier: Apache-2.0
"""A process that hangs as in a driver: it does not end when it is killed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.support.supervised import eventually

FREEZER = Path("/sys/fs/cgroup/freezer" if os.geteuid() == 0 else "/nonexistent")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process: it takes no signal, not even the one that kills."""
    group = FREEZER / f"slurm-health-test-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        eventually(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "frozen")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the end of the process")
        group.rmdir()
