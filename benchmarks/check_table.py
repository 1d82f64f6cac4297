# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m benchmarks.check`, and the machine it was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from tabulate import tabulate

from benchmarks.check_cases import Case, duration
from benchmarks.check_measure import Sample
from tests.lab.daemons import CLEAN_PATH

_HEADERS = ["case", "target", "median (min … max)", "of a bare srun", "verdict right"]
_DLROVER = "DLRover"
_NOTHING = "–"  # noqa: RUF001
_REASON_LENGTH = 160


@dataclass(kw_only=True)
class Row:
    """What the runs of one case came to: figures, and reasons of runs that gave none."""

    case: Case
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    dlrover_samples: list[Sample] = field(default_factory=list)
    dlrover_failures: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What was wrong with verdicts of ours."""
        return [sample.wrong for sample in self.samples if sample.wrong]


def figures(samples: Sequence[Sample]) -> str:
    """Return the times of some runs in one cell."""
    times = [sample.elapsed_s for sample in samples]
    middle = duration(statistics.median(times))
    if len(times) == 1:
        return middle
    return f"{middle} ({duration(min(times))} … {duration(max(times))})"


def of_bare(samples: Sequence[Sample]) -> str:
    """Return how many times as long the runs took as a bare srun just before each."""
    times = [sample.elapsed_s / sample.bare_s for sample in samples if sample.bare_s]
    return f"{statistics.median(times):.1f} x" if times else _NOTHING


def rights(samples: Sequence[Sample]) -> str:
    """Return how many verdicts were right."""
    return f"{sum(not sample.wrong for sample in samples)} of {len(samples)}"


def table(rows: Sequence[Row], *, with_dlrover: bool) -> str:
    """Return the table, and below it every run that was wrong or gave no figure."""
    lines = [_line(row, with_dlrover=with_dlrover) for row in rows]
    headers = [*_HEADERS, *([_DLROVER] if with_dlrover else [])]
    text = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    notes = [note for row in rows for note in _notes(row)]
    return "\n".join([text, *([""] if notes else []), *notes])


def machine_facts() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
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


def _line(row: Row, *, with_dlrover: bool) -> list[str]:
    cells = [row.case.title, row.case.target]
    if row.samples:
        cells += [figures(row.samples), of_bare(row.samples), rights(row.samples)]
    else:
        cells += ["not measured", _NOTHING, _NOTHING]
    return [*cells, _dlrover_cell(row)] if with_dlrover else cells


def _dlrover_cell(row: Row) -> str:
    if row.dlrover_samples:
        return f"{figures(row.dlrover_samples)}, {rights(row.dlrover_samples)} right"
    return "not measured" if row.dlrover_failures else _NOTHING


def _notes(row: Row) -> list[str]:
    notes = [f"wrong: {text}" for text in row.wrong]
    notes += [f"not measured: {text}" for text in row.failures]
    notes += [f"{_DLROVER} wrong: {sample.wrong}" for sample in row.dlrover_samples if sample.wrong]
    notes += [f"{_DLROVER} not measured: {text}" for text in row.dlrover_failures]
    return [f"{row.case.name}: {_shortened(note)}" for note in notes]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"


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
