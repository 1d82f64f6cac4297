# SPDX-License-Identifier: Apache-2.0
"""Results that pages cite: a JSON file per measurement, with where and when it was made."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.lab.daemons import CLEAN_PATH

DIRECTORY = Path(__file__).parent


def machine_facts() -> dict[str, Any]:
    """Return what figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "slurm": _slurm_version(),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return the same for a reader."""
    return (
        f"{machine['date']}, {machine['system']}, {machine['cores']} cores, load average"
        f" {machine['load_average']} at the start, Python {machine['python']},"
        f" torch {machine['torch']}, Slurm {machine['slurm']}"
    )


def keep(name: str, machine: dict[str, Any], rows: Iterable[dict[str, Any]]) -> Path:
    """Write a measurement's rows, each with the machine; those of other cases stay.

    A row's `case` says which it is. Returns the file.
    """
    known = {row["case"]: row for row in rows_of(name)}
    known |= {row["case"]: {**row, "machine": machine} for row in rows}
    path = DIRECTORY / f"{name}.json"
    path.write_text(json.dumps(list(known.values()), indent=1, ensure_ascii=False) + "\n")
    return path


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a measurement; none if it was never kept."""
    path = DIRECTORY / f"{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def _commit() -> str:
    argv = ["git", "-C", str(DIRECTORY), "describe", "--always", "--dirty"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=10)
    return done.stdout.strip() or "unknown"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _slurm_version() -> str:
    # Slurm's own commands want a configuration before they tell their version; the daemon does not.
    release = os.environ.get("LAB_RELEASE")
    daemon = "/usr/sbin/slurmctld" if release else shutil.which("slurmctld", path=CLEAN_PATH)
    if daemon is None:
        return "not installed"
    argv = [*(("chroot", release) if release else ()), daemon, "-V"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=10)
    return done.stdout.strip().rpartition(" ")[2] or "unknown"
