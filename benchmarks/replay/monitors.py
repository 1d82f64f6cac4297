# SPDX-License-Identifier: Apache-2.0
"""What the tests of other monitors of nodes hold of kernel lines and of diagnostics.

A case is a fault of the node there, or none. One that only warns here, or leaves it open, and is a
fault there is undecided; one that is a fault here and none there accuses an innocent.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.replay.source import Case, Source, scored
from slurm_health.node.checks.external import ProgramRun
from slurm_health.node.checks.kernel_log import Xid
from slurm_health.node.checks.vendors import Dcgm
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import BLOCK_IO_ERROR, FAULTS, WARNINGS, is_evidence

_FAULTS = re.compile("|".join(FAULTS))
_WARNINGS = re.compile("|".join((*WARNINGS, BLOCK_IO_ERROR)))
_BEFORE = re.compile(r"^(?:\s*\[[^\]]*\])*\s*(?:kernel: )?")  # what dmesg puts before a line
_GO_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_GO_TEXTS = rf"{_GO_TEXT}(?:\s*\+\s*{_GO_TEXT})*"


def kernel_status(text: str) -> Status:
    """Return the worst that lines of the kernel come to by the checks of its log."""
    lines = [_BEFORE.sub("", line) for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if is_evidence(line)]
    gpus = Xid().judge(lines).status
    if gpus is Status.NODE_FAULT or any(map(_FAULTS.search, lines)):
        return Status.NODE_FAULT
    warned = gpus is Status.WARN or any(map(_WARNINGS.search, lines))
    return Status.WARN if warned else Status.PASS


def _go_text(found: str) -> str:
    return "".join(json.loads(each) for each in re.findall(_GO_TEXT, found))


def _nvsentinel(place: Path) -> Iterator[Case]:
    """Yield what wants a reset, a reboot or the vendor, what is fatal of a switch, what is lost."""
    tests = (
        ("xid/parser/csv_test.go", "message", r"RecommendedAction_(?!NONE)\w+", r"_NONE|: +false"),
        ("sxid/sxid_handler_test.go", "line", r"IsFatal: +true", r"IsFatal: +false"),
        ("gpufallen/gpufallen_handler_test.go", "message", r"Event: +true", r"Non-matching"),
    )
    told = set()
    for name, key, fault, none in tests:
        for case in re.split(r"\bname:", (place / name).read_text())[1:]:
            found = re.search(rf"\b{key}:\s*({_GO_TEXTS})", case)
            is_fault = re.search(fault, case.partition("t.Run")[0]) is not None
            if found and (is_fault or re.search(none, case)):
                told.add((_go_text(found[1]), is_fault))
    for text, is_fault in sorted(told):
        yield text, kernel_status(text), is_fault


def _gcm(place: Path) -> Iterator[Case]:
    """Yield what is critical of Xid errors and of `dcgmi diag`."""
    for name, judged in (("test_check_syslogs.py", kernel_status), ("test_check_dcgmi.py", _dcgm)):
        tree = ast.parse((place / name).read_text())
        outputs = dict(_shell_outputs(tree))
        for variable, code in _expected(tree, outputs):
            text = outputs[variable]
            if "NVRM:" in text or "DCGM" in text:
                yield f"{variable}: {text}", judged(text), code == "CRITICAL"


def _dcgm(text: str) -> Status:
    return Dcgm().judge(ProgramRun(code=0, output=text)).status


def _shell_outputs(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            last = node.value.args[-1:]
            for target in node.targets:
                if last and isinstance(last[0], ast.Constant) and isinstance(target, ast.Name):
                    yield target.id, str(last[0].value)


def _expected(tree: ast.Module, outputs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each output with the code that a test expects: `(name, (ExitCode.OK, …))`."""
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(
                elts=[ast.Name(id=name), ast.Tuple(elts=[ast.Attribute(attr=code), *_])]
            ) if name in outputs:
                yield name, code


def _node_problem_detector(place: Path) -> Iterator[Case]:
    """Yield its recorded problems; a fault is what its own rules hold for permanent."""
    permanent = [
        rule["pattern"]
        for path in sorted((place / "config").glob("*.json"))
        for rule in _rules(json.loads(path.read_text()))
        if rule.get("type") == "permanent" and rule.get("pattern")
    ]
    for path in sorted((place / "test/kernel_log_generator/problems").iterdir()):
        text = path.read_text(errors="replace")
        is_fault = any(re.search(each, line) for each in permanent for line in text.splitlines())
        yield f"{path.name}: {text}", kernel_status(text), is_fault


def _rules(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = document.get("rules")
    return found if isinstance(found, list) else []


def _eks(place: Path) -> Iterator[Case]:
    """Yield the lines of the kernel, of which some are fatal and most are warnings."""
    text = (place / "kernel/monitor_test.go").read_text()
    pattern = rf"\{{({_GO_TEXT}), {_GO_TEXT}, resource\.ResourceTypeDmesg, .*Severity(\w+)\}}"
    for line, severity in re.findall(pattern, text):
        yield line, kernel_status(_go_text(line)), severity == "Fatal"
    text = (place / "nccl/nccl_test.go").read_text() if (place / "nccl").is_dir() else ""
    for line in re.findall(rf"kmsgChan <- ({_GO_TEXT})", text):
        yield line, kernel_status(_go_text(line)), "SeverityFatal" in text


_ALL = "all, by its own tests"
SOURCES = (
    Source(
        name="NVSentinel",
        place="health-monitors/syslog-health-monitor/pkg",
        anchor=_ALL,
        seen=True,
        score=scored("NVSentinel", _nvsentinel),
    ),
    Source(
        name="gcm",
        place="gcm/tests/health_checks_tests",
        anchor=_ALL,
        seen=True,
        score=scored("gcm", _gcm),
    ),
    Source(
        name="node-problem-detector",
        place="test/kernel_log_generator/problems",
        anchor="all, by its own rules",
        seen=False,
        score=lambda place: scored("node-problem-detector", _node_problem_detector)(
            place.parents[2]
        ),
    ),
    Source(
        name="eks-node-monitoring-agent",
        place="monitors/kernel/monitor_test.go",
        anchor=_ALL,
        seen=False,
        score=lambda place: scored("eks-node-monitoring-agent", _eks)(place.parents[1]),
    ),
)
