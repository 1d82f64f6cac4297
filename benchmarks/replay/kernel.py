# SPDX-License-Identifier: Apache-2.0
"""Kernel lines of GPUs and disks, with what another monitor's own tests hold of them.

An Xid line is held fatal or a warning there: one that is a fault of the node here and none there
accuses an innocent. Of a disk's line its tests say that the monitor knows it, or not, and it tells
of each that it knows as a warning: one counts as right that is a fault or a warning here where it
is known there, and nothing where it is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.source import Score, Source
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import BLOCK_IO_ERROR, FAULTS, WARNINGS, XID, is_evidence
from slurm_health.node.rules.xid import judge_xid

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


def score(directory: Path) -> Score:
    """Judge each line as the node's checks do."""
    score = Score()
    for line, is_fault in sorted(set(_gpu_cases(directory))):
        status = _status(line)
        score.innocent += status is Status.NODE_FAULT and not is_fault
        _take(score, line, status, right=(status is Status.NODE_FAULT) is is_fault)
    for line, is_known in sorted(set(_disk_cases(directory))):
        status = _status(line)
        score.innocent += status is Status.NODE_FAULT and not is_known
        _take(score, line, status, right=(status is not Status.PASS) is is_known)
    return score


def _take(score: Score, line: str, status: Status, *, right: bool) -> None:
    if right:
        score.right += 1
    else:
        score.miss(f"{status.name}: {line[:120]}", undecided=status is Status.WARN)


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
        return judge_xid(int(found["number"]), found["text"])[0]
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
        score=score,
    ),
)
