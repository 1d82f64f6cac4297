# SPDX-License-Identifier: Apache-2.0
"""Children of hooks that the kernel holds, by what they were to do: none is sent after them.

A filesystem that froze an hour ago would hold two more with every health check.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.system import proc
from slurm_health.system.killable import Hung, Work, WorkResult, run_one

_DIRECTORY = "stuck"


class Stuck(msgspec.Struct, frozen=True):
    """A process that was killed and lives on. Its start and the boot tell it from later ones."""

    pid: int
    start_ticks: int
    boot: str


def run_guarded(state: Path | None, name: str, work: Work, limit_s: float) -> WorkResult | Stuck:
    """Run one piece of work in a child, unless the last one of this name is stuck."""
    held = recall(state).get(name)
    if held is not None:
        return held
    outcome = run_one(work, limit_s)
    if isinstance(outcome, Hung) and outcome.abandoned:
        remember(state, name, outcome.abandoned)
    return outcome


def remember(state: Path | None, name: str, pid: int) -> None:
    """Keep that a process is stuck at this. Where nothing can be kept, the next one starts."""
    found = _process(pid)
    if found is not None and state is not None:
        with contextlib.suppress(OSError):
            # Each by itself: what is made on the way to a directory others could enter.
            for directory in (state, state / _DIRECTORY):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _path(state, name).write_bytes(msgspec.json.encode(found))


def recall(state: Path | None) -> dict[str, Stuck]:
    """Return what is stuck still, by name, and forget the rest."""
    found: dict[str, Stuck] = {}
    if state is None:
        return found
    try:
        names = [each.stem for each in (state / _DIRECTORY).iterdir()]
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = from_json(_path(state, name).read_bytes(), Stuck)
            if _process(kept.pid) == kept:
                found[name] = kept
            else:
                _path(state, name).unlink()
    return found


def _path(state: Path, name: str) -> Path:
    return state / _DIRECTORY / f"{name}.json"


def _process(pid: int) -> Stuck | None:
    """Return a process as it is known again, None for one that has ended."""
    try:
        found = proc.stat(Path(f"/proc/{pid}"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (OSError, ValueError):
        return None
    return None if found.state == "Z" else Stuck(pid, found.start_ticks, boot.strip())
