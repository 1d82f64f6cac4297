# SPDX-License-Identifier: Apache-2.0
"""Where the main threads of processes are, with the frames of C++, as py-spy reads them.

The product asks for Python's frames only: with these, py-spy has to stop the process for seconds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from slurm_health.training.monitor import closer_look

_LIMIT_S = 12.0
_MOST_FRAMES = 60
_LONGEST = 120  # of a name: C++'s templates have thousands of letters


def of(ranks: Mapping[int, int]) -> dict[int, str]:
    """Return the stacks by rank, innermost call first; of none where py-spy cannot look.

    Args:
        ranks: by their processes.
    """
    command = closer_look.find_py_spy()
    if command is None:
        return {}
    asked = {
        rank: subprocess.Popen(
            [command, "dump", "--native", "--json", "--pid", str(pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for pid, rank in ranks.items()
    }
    found = {}
    for rank, process in asked.items():
        try:
            said, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0 and (stack := _main_thread(said)):
            found[rank] = stack
    return found


def _main_thread(said: bytes) -> str:
    for thread in json.loads(said):
        if thread.get("thread_name") == "MainThread":
            return "".join(f"{_line(each)}\n" for each in thread["frames"][:_MOST_FRAMES])
    return ""


def _line(frame: Mapping[str, Any]) -> str:
    name = str(frame["name"])[:_LONGEST]
    if name.startswith("0x"):
        name = "?"  # an address says nothing elsewhere
    where = str(frame.get("filename") or frame.get("module") or "")
    if frame.get("line"):
        return f"{name} ({where}:{frame['line']})"
    return f"{name} ({PurePath(where).name})"
