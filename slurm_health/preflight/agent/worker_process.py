# SPDX-License-Identifier: Apache-2.0
"""One worker process: started, spoken to, listened to, killed; and whether it stands still.

A worker has nothing of ours but the standard library, so it writes plain JSON. What it measures is
the journal's own record; the agent adds its node, and the group. All else it says is a `Line`.

A process that is busy, or waits for another one, cannot be told from outside from one that hangs,
however long it takes: a machine may be loaded, a kernel long, torch slow to load. Two things are
proof, on any machine: the process was stopped by a signal, or its main thread is in one sleep that
no signal ends, without having been woken in between.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from slurm_health.records.probe_catalog import ON_CPUS
from slurm_health.records.records import Sampled
from slurm_health.records.text import LineBuffer
from slurm_health.system import proc, processes
from slurm_health.system.signals import exit_text

WORKER = Path(__file__).parents[1] / "probes" / "worker.py"
STDERR_LINES = 20
# After the words of a C++ exception come its frames; after CUDA's come hints for programmers.
_CPP = "what():"
_FRAME, _TELLING = "frame #", (_CPP, "CUDA error:")
# A killed process gives back its devices' memory first, which takes seconds at most, or it hangs.
UNKILLABLE_S = 10.0


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One thing that a worker says, besides the records `Sampled`."""


class State(Line, frozen=True, kw_only=True, tag="state"):
    """How far it is before its first round, or why it ends.

    `loaded`: it has loaded `torch` and opens its device next, which is then `opened`. `no_torch`:
    its interpreter has none. `unusable`: its device is at fault, in its own words. `refused`: it
    does not use its device, for a reason that is no fault of it.
    """

    state: Literal["loaded", "opened", "no_torch", "unusable", "refused"]
    torch: str = ""
    detail: str = ""


class Ready(Line, frozen=True, kw_only=True, tag="ready"):
    """It waits for rounds; what it works with is recorded in `WorkersReady`."""

    store_port: int
    torch: str
    backend: str
    device: str
    collective_library: str
    start_ms: float
    model: str
    free_bytes: int
    ports_gbit_per_s: list[float] = []
    gflop_per_s: float = 0.0
    memory_gb_per_s: float = 0.0
    nvlink_domain: str = ""

    @property
    def on_cpus(self) -> bool:
        """Whether it computes with processors, not with an accelerator."""
        return self.backend in ON_CPUS


class ScopeEntered(Line, frozen=True, kw_only=True, tag="scope"):
    """The part of its round that it works in from now on: alone, or with partners."""

    round: int
    scope: str


class Done(Line, frozen=True, kw_only=True, tag="done"):
    """How its round ended: `measured`, `unmeasured`, `timed_out` or `failed`.

    `own_fault`: no other node can be the cause. `spent`: it is not to be used again. `connecting`:
    whom NCCL was connecting when it was told to stop, of its node by local rank, or all by rank.
    """

    round: int
    outcome: str
    detail: str
    own_fault: bool = False
    wrong_results: bool = False
    spent: bool = False
    connecting: list[int] = []  # msgspec copies it


class Gone(msgspec.Struct, frozen=True):
    """A worker ended or, `still`, its process stands still; `stopped`: by a signal."""

    how: str
    still: bool = False
    stopped: bool = False


InRound = ScopeEntered | Sampled | Done
_LINES = State | Ready | ScopeEntered | Done


def line_of(data: object) -> Line | Sampled:
    """Return what a worker's JSON stands for: a line, or a record of what it measured alone.

    The record's node and group are for the agent to name.

    Raises:
        ValueError: it stands for none.
    """
    if isinstance(data, dict) and "kind" in data:
        sampled: Sampled = msgspec.convert({**data, "node": "", "group": []}, Sampled)
        return sampled
    line: Line = msgspec.convert(data, _LINES)
    return line


class Worker:
    """One worker process of one device; it dies with the agent. A light one has its interpreter.

    `descriptors` are to be waited on; `read_lines` returns what has arrived. `ready` is what it
    said when it was, None before; `states` what it said of itself until then.
    """

    def __init__(
        self,
        *,
        python: str,
        local_rank: int,
        threads: int,
        devices: int,
        environ: Mapping[str, str],
        light: bool = False,
        address: str = "127.0.0.1",
    ) -> None:
        self.local_rank = local_rank
        self.on_cpus = not devices
        self.ready: Ready | None = None
        self.states: dict[str, State] = {}
        self._lines = LineBuffer()
        self._errors: list[str] = []
        self._killed = False
        try:
            interpreter = processes.own_python() if light else (python,)
            numbers = map(str, (local_rank, threads, devices))
            self._process: processes.Process | None = processes.start_tied(
                [*interpreter, str(WORKER), *numbers, "light" if light else "torch", address],
                environ=environ,
                stdin=processes.PIPE,
                stdout=processes.PIPE,
            )
        except OSError as err:
            self._process = None
            self.states["no_torch"] = State(state="no_torch")
            self._errors.append(f"cannot run {python}: {err.strerror}")
        self._watch = StandstillWatch(self._process.pid) if self._process else None

    @property
    def torch(self) -> str:
        """What it has loaded."""
        return self.states["loaded"].torch if "loaded" in self.states else ""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that become readable when the worker has something to say."""
        if self._process is None or self._killed:
            return ()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, command: Mapping[str, object]) -> None:
        """Send a command. A worker that is gone is noticed when its lines end."""
        if self._process is None or self._killed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def read_lines(self) -> list[Line | Sampled]:
        """Return the lines that have arrived since the last call; `ready` and `states` have them.

        What a library prints is none.
        """
        if self._process is None or self._killed:
            return []
        self._read_errors()
        lines = []
        for text in self._lines.feed(processes.read_available(self._process.stdout)):
            # Not decoded by msgspec: a probe of a site may give a figure that is not a number.
            with contextlib.suppress(ValueError, RecursionError):
                line = line_of(json.loads(text))
                lines.append(line)
                if isinstance(line, State):
                    self.states[line.state] = line
                elif isinstance(line, Ready):
                    self.ready = line
        return lines

    def gone(self) -> Gone | None:
        """Return how the worker ended, or that it stands still; None while it may be at work.

        Until it is ready it reads torch, and who knows from where: only a signal stops it then.
        """
        if self._killed:
            return Gone("killed")
        if self._process is None:
            return Gone(self._errors[-1])
        returncode = self._process.poll()
        if returncode is None:
            still = self._watch.found() if self._watch is not None else None
            return still if still and (still.stopped or self.ready) else None
        self._read_errors()
        telling = [line for line in self._errors if any(text in line for text in _TELLING)]
        last = (telling or self._errors)[-1:]
        reason = f": {last[0].removeprefix(_CPP).strip()}" if last else ""
        return Gone(exit_text(returncode) + reason)

    def look(self, now_s: float) -> None:
        """Look whether the worker stands still, now and then."""
        if self._watch is not None and not self._killed:
            self._watch.look(now_s)

    def leave(self) -> None:
        """Ask the worker to leave, without waiting for an answer."""
        if self._process is None or self._killed:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the worker with all its children. `ends_within` reaps it."""
        if self._process is None or self._killed:
            return
        self._killed = True
        processes.kill_session(self._process)
        processes.close_pipes(self._process)

    def ends_within(self, wait_s: float) -> bool:
        """Wait for the end of a worker; tell whether it came in time."""
        return self._process is None or processes.ends_within(self._process, wait_s)

    def _read_errors(self) -> None:
        assert self._process is not None
        text = processes.read_available(self._process.stderr).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        self._errors += [line for line in lines if line and not line.startswith(_FRAME)]
        del self._errors[:-STDERR_LINES]


def end_together(
    workers: Sequence[Worker], *, leave_s: float = 0.0, wait_s: float = UNKILLABLE_S
) -> list[Worker]:
    """End workers, all at the same time; return those that are still there after `wait_s`.

    No signal ends a process that waits for a driver or a filesystem. Others may leave by
    themselves within `leave_s`, and are killed after that.
    """
    for worker in workers:
        worker.leave()
    _still_there(workers, leave_s)
    for worker in workers:
        worker.kill()
    return _still_there(workers, wait_s)


def _still_there(workers: Sequence[Worker], wait_s: float) -> list[Worker]:
    end_s = time.monotonic() + wait_s
    return [
        worker for worker in workers if not worker.ends_within(max(0.0, end_s - time.monotonic()))
    ]


LOOK_S = 0.25
# Slurm stops and continues all processes of a step one after the other, within milliseconds.
STOPPED_S = 1.0
# A read from a disk or a page of a program takes less, unless what it is on is down.
HELD_S = 2.0
_STOPPED, _HELD = "T", "D"  # proc(5); "t", a process that is being debugged, is none of our concern


class StandstillWatch:
    """Looks at one process again and again.

    Only time between two looks counts: an agent that was stopped itself has not looked.
    """

    def __init__(self, pid: int) -> None:
        self._process = Path("/proc", str(pid))
        # The main thread's state, and how often it has gone to sleep.
        self._last: tuple[str, int] | None = None
        self._looked_s = 0.0
        self._still_s = 0.0

    def look(self, now_s: float) -> None:
        """Look, unless it is too soon since the last time."""
        passed_s = now_s - self._looked_s
        if passed_s < LOOK_S:
            return
        now = None
        with contextlib.suppress(OSError, ValueError):
            now = proc.stat(self._process).state, proc.voluntary_switches(self._process)
        stands = now is not None and now == self._last and now[0] in (_STOPPED, _HELD)
        self._still_s = self._still_s + min(passed_s, 2 * LOOK_S) if stands else 0.0
        self._last, self._looked_s = now, now_s

    def found(self) -> Gone | None:
        """Return why the process stands still, None unless it is proven that it does."""
        state = self._last[0] if self._last else ""
        if state == _STOPPED and self._still_s >= STOPPED_S:
            how = f"stopped by a signal for {self._still_s:.0f} s"
            return Gone(how, still=True, stopped=True)
        if state != _HELD or self._still_s < HELD_S:
            return None
        function = proc.kernel_waits(Path("/proc"), int(self._process.name), ())
        where = f" ({function})" if function else ""
        return Gone(f"held in the kernel{where} for {self._still_s:.0f} s", still=True)
