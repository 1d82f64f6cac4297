# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own diagnostic of its GPUs, `dcgmi diag`: run, read, and its findings named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.external import ProgramSeen, run_program
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    passed,
    warned,
)

# A document of level 3 over 16 GPUs has a few hundred KiB.
_OUTPUT_BYTES = 4 << 20
# What newer and older releases call the whole.
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
# Values of dcgm_errors.h's dcgmErrorSeverity_t. Monitored and misconfigured GPUs can be used; what
# is to be triaged, or unknown, may as well be a diagnostic that could not run.
_MONITOR, _ISOLATE, _CONFIG, _RESET = 1, 2, 5, 6
_FAULTS = {_ISOLATE: "", _RESET: "; reset the GPU"}
_HARMLESS = (_MONITOR, _CONFIG)


class Dcgm(Check, frozen=True, kw_only=True):
    """`dcgmi diag` at a level. It takes the GPUs for itself, for minutes from level 2 on."""

    SEEN = ProgramSeen
    EXCLUSIVE = True
    CONTEXTS = ("retest",)
    COMPONENTS = ("node", "device", "compute", "memory", "links")

    program: str = "dcgmi"
    level: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2

    def collect(self, machine: CheckContext) -> ProgramSeen:
        """Run it."""
        argv = [self.program, "diag", "-r", str(self.level), "-j"]
        return run_program(argv, machine, most_bytes=_OUTPUT_BYTES)

    def judge(self, seen: ProgramSeen) -> Finding:
        """Name what failed, on which GPU. What says nothing of a GPU's health is inconclusive."""
        document = _document(seen.output)
        if document is None:
            said = seen.said or f"exit code {seen.code}"
            return inconclusive(f"{self.program} gave no result: {said}")
        if stopped := document.get("runtime_error"):
            return inconclusive(f"{self.program}: {stopped}")
        results = list(_results(document))
        if not any(result.get("status") in {"Pass", "Fail", "Warn"} for _, result in results):
            return inconclusive(f"{self.program} ran no test")
        parts = [passed("", level=self.level)]
        parts += [
            _finding(test, result, error)
            for test, result in results
            if result.get("status") in {"Fail", "Warn"}
            for error in _errors(result)
        ]
        return joined(parts, well=f"dcgmi diag, level {self.level}: all tests passed")


def _document(output: str) -> Mapping[str, Any] | None:
    """Return what dcgmi reports, without the lines that other libraries print around it."""
    try:
        found = json.loads(output[output.index("{") : output.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    roots = [found[root] for root in _ROOTS if isinstance(found.get(root), dict)]
    return roots[0] if roots else None


def _results(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each test's name and what it came to on each GPU."""
    for category in _dicts(document.get("test_categories")):
        for test in _dicts(category.get("tests")):
            for result in _dicts(test.get("results")):
                yield str(test.get("name", "a test")), result


def _dicts(found: object) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _errors(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was found, each with its words; older releases give the words alone."""
    told = result.get("warnings")
    if isinstance(told, str):
        return [{"warning": told}]
    return _dicts(told) or [{"warning": str(result.get("info") or "failed")}]


def _finding(test: str, result: Mapping[str, Any], error: Mapping[str, Any]) -> Finding:
    number = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id")))
    where = f"{result.get('entity_group', 'GPU')} {number}: " if number is not None else ""
    text = f"{where}{test}: {error.get('warning', 'failed')}"
    severity = error.get("error_severity")
    if severity in _FAULTS and result.get("status") == "Fail":
        return node_fault(text + _FAULTS[severity], dcgm_error=int(error.get("error_id", 0)))
    if severity in _HARMLESS or result.get("status") == "Warn":
        return warned(text)
    return inconclusive(f"{text} (dcgmi does not say whether the GPU is at fault)")
