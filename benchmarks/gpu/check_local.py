# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local` with a fault in one worker, and what its partner has to say."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from benchmarks.gpu.machine import ROOT, Machine
from benchmarks.gpu.step import NotMeasured
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import NodeReported, RoundStarted, VerdictReached
from slurm_health.records.verdict import NodeVerdict
from slurm_health.system import journal
from slurm_health.system.processes import Process, end_session, start_tied

VICTIM = "local1"
_LIMIT_S = 240.0
_POLL_S = 0.005
# What makes `benchmarks.gpu.on_device.exchange` a probe of an installed package.
_METADATA = "Metadata-Version: 2.1\nName: exchange\nVersion: 1\n"
_ENTRY_POINT = "[slurm_health.probes.pair]\nexchange = benchmarks.gpu.on_device.exchange\n"


class Fault(Enum):
    """What happens to the victim's worker between two collectives, in each of its rounds."""

    NONE = "healthy"
    KILLED = "killed"
    STOPPED = "stopped"
    RAISES = "raises"


_SIGNALS = {Fault.KILLED: signal.SIGKILL, Fault.STOPPED: signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a check went. `partner_s` runs from the first fault to the word of who was with it."""

    elapsed_s: float
    verdicts: Mapping[str, NodeVerdict]
    strikes: int = 0
    partner_s: float | None = None
    partner_said: str = ""
    details: tuple[str, ...] = field(default=())


def check_local(
    machine: Machine,
    nodes: int,
    fault: Fault,
    *,
    environ: Mapping[str, str] | None = None,
) -> Course:
    """Check this machine as so many nodes, and break the victim in each round that has a partner.

    Raises:
        NotMeasured: the check did not end, or left no verdict.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        marks = directory / "marks"
        own = _environ(machine, directory, marks, fault) | dict(environ or {})
        # The whole course where nothing is broken; else what the fault strikes.
        probes = "standard" if fault is Fault.NONE else "exchange"
        argv = [
            *(
                sys.executable,
                "-P",
                "-m",
                "slurm_health",
                "check",
            ),  # with PYTHONPATH, for the probe
            f"--local={nodes}",
            f"--check={probes}",
            f"--journal={directory / 'journal'}",
            f"--python={machine.python}",
        ]
        begun_s = time.time()
        with (directory / "errors").open("wb") as errors:
            process = start_tied(argv, environ=own, stderr=errors.fileno())
            try:
                struck_s = _await_end(process, marks, fault)
            finally:
                end_session(process, grace_s=10.0)
        elapsed_s = time.time() - begun_s
        runs = list((directory / "journal").glob("local/*/0"))
        if not runs:
            said = (directory / "errors").read_text(errors="replace").strip().splitlines()
            raise NotMeasured(f"the check did not start: {(said or ['without a word'])[-1]}")
        return _course(runs[0], nodes, elapsed_s, struck_s)


def _environ(machine: Machine, directory: Path, marks: Path, fault: Fault) -> dict[str, str]:
    package = directory / "exchange-1.dist-info"
    package.mkdir()
    marks.mkdir()
    (package / "METADATA").write_text(_METADATA)
    (package / "entry_points.txt").write_text(_ENTRY_POINT)
    paths = [str(ROOT), str(directory), machine.environ.get("PYTHONPATH", "")]
    return {
        **machine.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "EXCHANGE_DIRECTORY": str(marks),
        "EXCHANGE_RAISES": VICTIM if fault is Fault.RAISES else "",
    }


def _await_end(process: Process, marks: Path, fault: Fault) -> list[float]:
    """Break each new worker of the victim; return when, once the check has ended.

    Raises:
        NotMeasured: the check did not end in time.
    """
    struck: dict[str, float] = {}
    give_up = time.monotonic() + _LIMIT_S
    while process.poll() is None:
        if time.monotonic() > give_up:
            raise NotMeasured(f"the check did not end within {_LIMIT_S:.0f} s")
        for mark in marks.glob(f"{VICTIM}.*"):
            if mark.name not in struck:
                struck[mark.name] = time.time()
                _strike(int(mark.name.rpartition(".")[2]), fault)
        time.sleep(_POLL_S)
    return sorted(struck.values())


def _strike(pid: int, fault: Fault) -> None:
    number = _SIGNALS.get(fault)
    if number is not None:
        with suppress(ProcessLookupError):  # it was ended meanwhile
            os.kill(pid, number)


def _course(run: Path, nodes: int, elapsed_s: float, struck_s: list[float]) -> Course:
    master = journal.read_all(run, journal.MASTER)
    verdict = next((e.record for e in master if isinstance(e.record, VerdictReached)), None)
    if verdict is None:
        raise NotMeasured("the check ended without a verdict")
    entries = {f"local{n}": journal.read_all(run, f"local{n}") for n in range(nodes)}
    partner_s, partner_said = _partner(master, entries, struck_s)
    return Course(
        elapsed_s=elapsed_s,
        verdicts={each.node: each for each in verdict.nodes},
        strikes=len(struck_s),
        partner_s=partner_s,
        partner_said=partner_said,
        details=tuple(each.detail for _, each in _reports(entries) if each.detail),
    )


def _partner(
    master: list[Entry], entries: Mapping[str, list[Entry]], struck_s: list[float]
) -> tuple[float | None, str]:
    """Return when after the first fault the victim's partner reported, and in which words."""
    if not struck_s:
        return None, ""
    before = [e for e in master if isinstance(e.record, RoundStarted) and e.time_s <= struck_s[0]]
    if not before:
        return None, ""
    record = before[-1].record
    assert isinstance(record, RoundStarted)
    partners = {node for group in record.groups if VICTIM in group for node in group} - {VICTIM}
    for time_s, report in _reports(entries):
        if report.node in partners and report.round == record.round:
            said = report.detail or report.outcome.value
            return time_s - struck_s[0], said
    return None, ""


def _reports(entries: Mapping[str, list[Entry]]) -> Iterator[tuple[float, NodeReported]]:
    for each in entries.values():
        for entry in each:
            if isinstance(entry.record, NodeReported):
                yield entry.time_s, entry.record
