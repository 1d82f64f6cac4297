# SPDX-License-Identifier: Apache-2.0
"""Whether a process that lives stands still, as the kernel shows it, and why.

A process that is busy, or waits for another one, cannot be told from outside from one that hangs,
however long it takes: a machine may be loaded, a kernel long, torch slow to load. Two things are
proof, on any machine: the process was stopped by a signal, or its main thread is in one sleep that
no signal ends, without having been woken in between.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

LOOK_S = 0.25
# Slurm stops and continues all processes of a step one after the other, within milliseconds.
STOPPED_S = 1.0
# A read from a disk or a page of a program takes less, unless what it is on is down.
HELD_S = 2.0
_STOPPED, _HELD = "T", "D"  # proc(5); "t", a process that is being debugged, is none of our concern


class Standstill(msgspec.Struct, frozen=True):
    """Why a process stands still. `stopped`: by a signal, so that no other node is the cause."""

    words: str
    stopped: bool


class _Seen(msgspec.Struct, frozen=True):
    """The main thread's state, and how often it has been scheduled since its start."""

    state: str
    switches: int


class StandstillWatch:
    """Looks at one process again and again.

    Only time counts in which somebody looked: whoever was stopped himself has seen nothing.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._status = proc / str(pid) / "status"
        self._wchan = proc / str(pid) / "wchan"
        self._seen: _Seen | None = None
        self._looked_s = 0.0
        self._still_s = 0.0

    def look(self, now_s: float) -> None:
        """Look, unless it is too soon since the last time."""
        passed_s = now_s - self._looked_s
        if passed_s < LOOK_S:
            return
        seen = self._read()
        stands = seen is not None and seen == self._seen and seen.state in (_STOPPED, _HELD)
        self._still_s = self._still_s + min(passed_s, 2 * LOOK_S) if stands else 0.0
        self._seen, self._looked_s = seen, now_s

    def found(self) -> Standstill | None:
        """Return why the process stands still, None unless it is proven that it does."""
        if self._seen is None:
            return None
        if self._seen.state == _STOPPED and self._still_s >= STOPPED_S:
            return Standstill(f"stopped by a signal for {self._still_s:.0f} s", stopped=True)
        if self._seen.state == _HELD and self._still_s >= HELD_S:
            return Standstill(f"held{self._where()} for {self._still_s:.0f} s", stopped=False)
        return None

    def _read(self) -> _Seen | None:
        try:
            lines = self._status.read_text(errors="replace").splitlines()
        except OSError:
            return None
        fields = dict(line.partition(":")[::2] for line in lines)
        switches = [value for name, value in fields.items() if name.endswith("ctxt_switches")]
        try:
            return _Seen(fields["State"].split()[0], sum(map(int, switches)))
        except (KeyError, ValueError):
            return None

    def _where(self) -> str:
        """Say where in the kernel, if it tells."""
        try:
            function = self._wchan.read_text().strip()
        except OSError:
            function = ""
        return f" in the kernel ({function})" if function.strip("0") else " in the kernel"
