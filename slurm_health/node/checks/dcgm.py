# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own diagnostic of its GPUs, `dcgmi diag`: run, read, and its findings named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.external import ProgramSeen, json_in, run_program
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
# Values of dcgm_errors.h's dcgmError_t. These tell of software, whatever severity DCGM gives them:
# a file, a parameter, a library, the driver, a library again, processes of somebody else, the host
# engine, variables, persistence mode.
_OF_SOFTWARE = frozenset({18, 21, 22, 23, 24, 25, 26, 28, 29})
# Values of its dcgmErrorCategory_t: configuration, libraries, CUDA, and other software, as what
# joins the NVLinks of several nodes (IMEX). Xids and the vendor's own hardware test have others.
_SOFTWARE_CATEGORIES = frozenset({3, 4, 6, 8})
_NVLINK_DOWN = 14
# The words of that error, for releases that give words alone: GPU 3's NvLink link 5 is currently
# down
_NVLINK_DOWN_WORDS = re.compile(r"\bNvLink link \d+ is currently down")
# The category of what is looked at before any test of the hardware, and all that level 1 has.
_SOFTWARE_CATEGORY = "deployment"
_LOOKS_ONLY = 1
# Of these, older releases have words alone, and no number: what they look at is software.
_OF_SETTINGS = frozenset(
    {
        "blacklist",
        "denylist",
        "nvml library",
        "cuda main library",
        "cuda toolkit libraries",
        "permissions and os blocks",
        "persistence mode",
        "environment variables",
        "graphics processes",
    }
)
_RAN = frozenset({"pass", "fail", "warn"})


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
        ran = [each for each in results if each.status in _RAN]
        if not ran:
            return inconclusive(f"{self.program} ran no test")
        parts = [passed("", level=self.level)]
        if self.level > _LOOKS_ONLY and all(each.is_of_software for each in ran):
            skipped = ", ".join(sorted({each.test for each in results if not each.is_of_software}))
            said = f"{self.program} tested no hardware{f' (skipped: {skipped})' if skipped else ''}"
            parts.append(inconclusive(said))
        parts += [
            _finding(each, error)
            for each in ran
            if each.status != "pass"
            for error in _errors(each.said)
        ]
        return joined(parts, well=f"dcgmi diag, level {self.level}: all tests passed")


class _Result(NamedTuple):
    """What a test came to on a GPU; `status` is in small letters, as releases differ in that."""

    test: str
    is_of_software: bool
    status: str
    said: Mapping[str, Any]


def _document(output: str) -> Mapping[str, Any] | None:
    """Return what dcgmi reports."""
    found = json_in(output)
    if not isinstance(found, dict):
        return None
    roots = [found[root] for root in _ROOTS if isinstance(found.get(root), dict)]
    return roots[0] if roots else None


def _results(document: Mapping[str, Any]) -> Iterator[_Result]:
    """Yield what each test came to on each GPU."""
    for category in _dicts(document.get("test_categories")):
        of_software = str(category.get("category", "")).lower() == _SOFTWARE_CATEGORY
        for test in _dicts(category.get("tests")):
            name = str(test.get("name", "a test"))
            for result in _dicts(test.get("results")):
                yield _Result(name, of_software, str(result.get("status", "")).lower(), result)


def _dicts(found: object) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _errors(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was found, each with its words; older releases give the words alone."""
    told = result.get("warnings")
    if isinstance(told, str):
        return [{"warning": told}]
    return _dicts(told) or [{"warning": str(result.get("info") or "failed")}]


def _finding(found: _Result, error: Mapping[str, Any]) -> Finding:
    result = found.said
    number = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id")))
    where = f"{result.get('entity_group', 'GPU')} {number}: " if number is not None else ""
    words = str(error.get("warning", "failed"))
    text = f"{where}{found.test}: {words}"
    told = (_number(error.get(f"error_{each}")) for each in ("severity", "category", "id"))
    severity, category, code = told
    of_software = severity in _FAULTS and category in _SOFTWARE_CATEGORIES
    of_settings = found.is_of_software and found.test.lower() in _OF_SETTINGS
    if of_software or code in _OF_SOFTWARE or (of_settings and not severity):
        return warned(text)
    is_link = code == _NVLINK_DOWN or _NVLINK_DOWN_WORDS.search(words)
    if found.status == "fail" and (is_link or severity in _FAULTS):
        helps = "" if is_link else _FAULTS[severity]
        return node_fault(text + helps, dcgm_error=_NVLINK_DOWN if is_link else code)
    if severity in _HARMLESS or found.status == "warn":
        return warned(text)
    return inconclusive(f"{text} (dcgmi does not say whether the GPU is at fault)")


def _number(told: object) -> int:
    """Return a number of DCGM's tables; 0, which says nothing, where there is none."""
    return told if isinstance(told, int) else 0
