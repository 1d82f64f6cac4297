# SPDX-License-Identifier: Apache-2.0
"""Lines of the kernel's log that the owners of a cluster of 8 GPUs a node hold for harmless.

A case is a line of their list, with addresses put in where the list says only that there is one, or
an SXid by its number, as the driver words one that is not fatal. One that is a fault of the node
here accuses an innocent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.monitors import kernel_status
from benchmarks.replay.source import Case, Source, scored

_LINES, _SXIDS = "WHITELISTED_MESSAGES", "WHITELISTED_NVSWITCH_SXID_ERRORS"
_PLACES = {"ADDR": "0000:3b:00.0", "HEX": "0x7f0000", "HOST_NUM": "0"}


def _cases(path: Path) -> Iterator[Case]:
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List() as listed):
                told = [str(each) for each in ast.literal_eval(listed)]
                if name == _LINES:
                    yield from ((each, kernel_status(_filled(each)), False) for each in told)
                if name == _SXIDS:
                    lines = map(_sxid, told)
                    yield from ((each, kernel_status(each), False) for each in lines)


def _filled(line: str) -> str:
    for place, text in _PLACES.items():
        line = line.replace(place, text)
    return line


def _sxid(number: str) -> str:
    return f"nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): {number}, Non-fatal, Link 28 error"


SOURCES = (
    Source(
        name="cluster-health",
        place="health_checks/dmesg_whitelist.py",
        anchor="all, by its own list",
        seen=False,
        score=scored("cluster-health", _cases),
    ),
)
