# SPDX-License-Identifier: Apache-2.0
"""Kernel lines of GPUs and disks, with what another monitor's own tests hold of them.

An Xid line is held fatal or a warning there. Of a disk's line its tests say that the monitor knows
it, or not, and it holds a node unhealthy for each that it knows. One that is a fault of the node
here and none there accuses an innocent; a warning here leaves a fault there undecided.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.source import Case, Source, scored
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    BLOCK_IO_ERROR,
    FAULTS,
    WARNINGS,
    XID,
    is_evidence,
    of_xid,
)

_XID = re.compile(XID)
_FAULTS = re.compile("|".join(FAULTS))
_WARNINGS = re.compile("|".join((*WARNINGS, BLOCK_IO_ERROR)))
# {"name", "NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Fatal …", apiv1.EventTypeFatal}
_XID_CASE = re.compile(r'"([^"\n]*NVRM: Xid [^"\n]*)"[^}\n]*?EventType(\w+)')
_DISK_CASE = re.compile(r'line:\s*"([^"\n]*)",\s*want:\s*(true|false)')
# What dmesg and journals put before a line, and syslog around one that came again; the kernel does
# not.
_AROUND = re.compile(
    r"^(?:\[[^\]]*\] )?(?:kernel: )?(?:message repeated \d+ times: \[)?(?P<line>.*?)\]?$"
)


def _cases(directory: Path) -> Iterator[Case]:
    """Yield each line as the node's checks judge it."""
    for line, is_fault in sorted({*_gpu_cases(directory), *_disk_cases(directory)}):
        yield line, _status(line), is_fault


def _gpu_cases(directory: Path) -> Iterator[tuple[str, bool]]:
    for path in sorted((directory / "accelerator/nvidia/xid").glob("*_test.go")):
        for line, kind in _XID_CASE.findall(path.read_text()):
            yield line, kind in {"Fatal", "Critical"}


def _disk_cases(directory: Path) -> Iterator[tuple[str, bool]]:
    for line, want in _DISK_CASE.findall((directory / "disk/kmsg_matcher_test.go").read_text()):
        yield line, want == "true"


def _status(told: str) -> Status:
    line = _AROUND.sub(r"\g<line>", told)
    if found := _XID.search(line):
        return of_xid(int(found["number"]), found["text"]).status
    if not is_evidence(line):
        return Status.PASS
    if _FAULTS.search(line):
        return Status.NODE_FAULT
    return Status.WARN if _WARNINGS.search(line) else Status.PASS


SOURCES = (
    Source(
        name="gpud",
        place="components",
        anchor="all, by its own tests",
        seen=True,
        score=scored("gpud", _cases),
    ),
)
