# SPDX-License-Identifier: Apache-2.0
"""`dcgmi diag` of real machines, and what DCGM holds of each error that it may report.

A case of DCGM's own table is an error with its severity: one of the hardware for which a GPU is to
be isolated or reset is a fault, one that may be lived with or configured is none. What DCGM leaves
to triage is no case. A case of a recorded document is what its owners' test holds of it: a fault,
nothing that was tested, or hardware that passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.source import Case, Score, Source, scored
from slurm_health.node.checks.external import ProgramRun
from slurm_health.node.checks.vendors import Dcgm
from slurm_health.node.rules.finding import Status

_ENTRY = re.compile(
    r"DCGM_ERROR_TABLE_ENTRY\(\s*(?P<name>DCGM_FR_\w+),\s*(?P<severity>DCGM_ERROR_\w+),"
    r"\s*(?P<category>DCGM_FR_EC_\w+)\s*\)"
)
_NUMBER = re.compile(r"\b(DCGM_(?:FR|ERROR)_\w+)\s*=\s*(\d+),(?:.*(NOT USED))?")
_DECIDED = {
    "DCGM_ERROR_ISOLATE": True,
    "DCGM_ERROR_RESET": True,
    "DCGM_ERROR_MONITOR": False,
    "DCGM_ERROR_CONFIG": False,
}
# Software, whose number DCGM tells apart from an error of the hardware that software met.
_OF_SOFTWARE = re.compile(r"_SOFTWARE_(?:CONFIG|LIBRARY|CUDA|OTHER)$")
# Of the captured documents, by the tests of their owners: a warning of persistence mode in each.
_CAPTURED = {
    "gb10-level1.json": (1, Status.WARN),
    "gb10-level2-partial-skip.json": (2, Status.INCONCLUSIVE),
    "gb10-level2-plugins-gated.json": (2, Status.INCONCLUSIVE),
    "gb10-level2-plugins-allowed.json": (2, Status.WARN),
}


def _of_table(place: Path) -> Iterator[Case]:
    """Judge each error as a test that fails by it."""
    for name, error, is_fault in _errors(place):
        yield name, _judged(json.dumps(_document(error)), level=2), is_fault


def _errors(place: Path) -> Iterator[tuple[str, dict[str, object], bool]]:
    numbers = {}
    for name, number, unused in _NUMBER.findall((place / "dcgm_errors.h").read_text()):
        if not unused:
            numbers[name] = int(number)
    for entry in _ENTRY.finditer((place / "src/dcgm_errors.c").read_text()):
        is_fault = _DECIDED.get(entry["severity"])
        if is_fault is None or entry["name"] not in numbers:
            continue
        error: dict[str, object] = {
            "error_id": numbers[entry["name"]],
            "error_severity": numbers[entry["severity"]],
            "error_category": numbers[entry["category"]],
            "warning": entry["name"],
        }
        of_software = _OF_SOFTWARE.search(entry["category"]) is not None
        yield entry["name"], error, is_fault and not of_software


def _document(error: dict[str, object]) -> dict[str, object]:
    result = {"entity_group": "GPU", "entity_id": 0, "status": "Fail", "warnings": [error]}
    test = {"name": "memory", "results": [result]}
    return {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [test]}]}}


def score_captured(place: Path) -> Score:
    """Judge each document that was captured on a machine."""
    score = Score()
    for name, (level, truth) in _CAPTURED.items():
        status = _judged((place / name).read_text(), level=level)
        score.right += status is truth
        score.innocent += status is Status.NODE_FAULT
        score.undecided += status is not truth and status is Status.INCONCLUSIVE
        score.wrong += status is not truth and status is not Status.INCONCLUSIVE
        if status is not truth:
            score.missed.append(f"{status.name}: {name}, truth {truth.name}")
    return score


def _judged(text: str, level: int) -> Status:
    return Dcgm(level=level).judge(ProgramRun(code=0, output=text)).status


SOURCES = (
    Source(
        name="DCGM",
        place="dcgmlib",
        anchor="all, by its own table",
        seen=True,
        score=scored("DCGM", _of_table),
    ),
    Source(
        name="glimmer-burnin",
        place="runners/dcgm-diag/testdata",
        anchor="all, by its own tests",
        seen=True,
        score=score_captured,
    ),
)
