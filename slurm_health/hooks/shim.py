# SPDX-License-Identifier: Apache-2.0
"""What stands in a shim as it is installed: which interpreter, which file, how long."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import msgspec

_LINE = re.compile(r"^(python|config|limit)=(.*)$", re.MULTILINE)
_CALL = "slurm_health.hooks"
_MOST_BYTES = 64 << 10


class Shim(msgspec.Struct, frozen=True, kw_only=True):
    """The three lines of a shim that a site edits."""

    path: str
    python: str
    config: str
    limit_s: int


def read_shim(path: Path) -> Shim | None:
    """Return what a script says; None for one that is no shim, or that cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    if _CALL not in text:
        return None
    said = {key: value.strip().strip("\"'") for key, value in _LINE.findall(text)}
    limit = said.get("limit", "")
    return Shim(
        path=str(path),
        python=said.get("python", ""),
        config=said.get("config", ""),
        limit_s=int(limit) if limit.isdecimal() else 0,
    )


def trouble(path: str, *, program: bool = True) -> str:
    """Return why slurmd cannot use a file; empty when it can, or when it cannot be told.

    An ordinary user may not be able to look where root keeps its scripts.
    """
    try:
        mode = Path(path).stat().st_mode
    except PermissionError:
        return ""
    except OSError:
        return "is not there"
    if not stat.S_ISREG(mode):
        return "is not a file"
    return "is not executable" if program and not mode & 0o111 else ""
