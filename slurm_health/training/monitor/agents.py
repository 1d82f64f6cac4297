# SPDX-License-Identifier: Apache-2.0
"""The agents of all nodes: started, asked, replaced.

In a job one srun starts them, while its script runs and once more after it has failed; outside
Slurm each node's torchrun runs its own, and carries what they send (`torchrun.in_job.monitor`).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from slurm_health.records.text import LineBuffer
from slurm_health.system.processes import (
    NOTHING,
    PIPE,
    Process,
    end_session,
    own_module,
    start_tied,
)
from slurm_health.system.slurm.command import clean_environ, step_argv
from slurm_health.training.diagnosis.samples import Look, NodeReport
from slurm_health.training.monitor.messages import (
    HERE,
    INSPECT,
    REPORTS,
    STATE,
    MessageReader,
)

HERE_S = 10.0  # from one word that the watch is there to the next
# For all nodes to answer: an inspection takes two looks, and a state what a child may take; a busy
# node takes longer.
_LIMITS_S = {INSPECT: 25.0, STATE: 8.0}
_MOST_LINE_BYTES = 1 << 20
_LEAVE_S, _GRACE_S = 1.0, 0.5
_SILENT_S = 30.0  # six samples without a report
_STARTS_S = 20.0  # for srun and the interpreters
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # from one start of agents that are gone to the next
_FEW = 8  # nodes: each is started alone, so that one that is lost does not hold up the others
_CARRIED_STARTS_S = 30.0  # until all that was sent before is read
_END = b"end"


class ScriptOver(Exception):
    """The script has ended, and nothing is read any more."""


class AgentsEnded(Exception):
    """Nothing carries what the agents send any more."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Where to read what agents send, and to write to them, in place of a process of ours."""

    stdin: IO[bytes]
    stdout: IO[bytes]


@dataclass(kw_only=True)
class Connection:
    """The agents of some nodes that were started together."""

    process: Process | Carried
    nodes: tuple[str, ...]
    lines: LineBuffer = field(default_factory=lambda: LineBuffer(_MOST_LINE_BYTES))
    reader: MessageReader[NodeReport] = field(default_factory=lambda: MessageReader(REPORTS))

    @property
    def pipe(self) -> int:
        """Where their lines are read."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def write(self, word: bytes) -> None:
        """Send a word to all of them."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.process.stdin.fileno(), word + b"\n")

    def end(self) -> None:
        """End them: they leave when their standard input ends."""
        if isinstance(self.process, Carried):
            self.write(_END)
        elif self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            end_session(self.process, leave_s=_LEAVE_S, grace_s=_GRACE_S)


Start = Callable[[Sequence[str]], Process | Carried]


class Agents:
    """One agent on each node.

    Args:
        start: starts those of some nodes; raises OSError.
        observe: is called with each report.
        control: a file that ends when the script does, if there is one.
        alone: agents can be started for some nodes without the others.
    """

    def __init__(
        self,
        start: Start,
        observe: Callable[[NodeReport], None] = lambda _: None,
        control: int | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._start = start
        self._observe = observe
        self._control = () if control is None else (control,)
        self._alone = alone
        self._connections: list[Connection] = []
        self._last_seen_s: dict[str, float] = {}
        self._here_s = self._again_s = -math.inf
        self._pause_s = 0.0
        self.nodes: tuple[str, ...] = ()

    def begin(self, nodes: Sequence[str]) -> None:
        """Start the agents of these nodes.

        Raises:
            OSError: they cannot be started.
        """
        process = self._start(nodes)
        self._connections.append(Connection(process=process, nodes=tuple(nodes)))
        starts_s = time.monotonic() + _STARTS_S - _SILENT_S
        self._last_seen_s |= dict.fromkeys(nodes, starts_s)
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))

    def receive(self, wait_s: float) -> list[NodeReport]:
        """Take in what agents send for so long; return their reports.

        Raises:
            ScriptOver: the script has ended.
            AgentsEnded: what carries them has ended.
        """
        now_s = time.monotonic()
        if now_s - self._here_s >= HERE_S:
            self._here_s = now_s
            self._write(HERE)
        reports: list[NodeReport] = []
        until_s = now_s + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            by_pipe = {connection.pipe: connection for connection in self._connections}
            ready, _, _ = select.select([*self._control, *by_pipe], [], [], left_s)
            for pipe in ready:
                if pipe in by_pipe:
                    reports += self._read(by_pipe[pipe])
                elif not os.read(pipe, 4096):
                    raise ScriptOver
        return reports

    def _read(self, connection: Connection) -> list[NodeReport]:
        data = os.read(connection.pipe, 1 << 20)
        if not data:
            if isinstance(connection.process, Carried):
                raise AgentsEnded
            connection.end()
            self._connections.remove(connection)
            others = {node for other in self._connections for node in other.nodes}
            lost = set(connection.nodes) & set(self.nodes) - others
            self._last_seen_s |= dict.fromkeys(lost, -math.inf)
        reports = []
        for line in connection.lines.feed(data):
            report = connection.reader.take(line)
            if report is not None and report.node in self.nodes:
                self._last_seen_s[report.node] = time.monotonic()
                self._observe(report)
                reports.append(report)
        return reports

    def ask(
        self, word: bytes, nodes: Sequence[str] = (), limit_s: float = math.inf
    ) -> dict[str, NodeReport]:
        """Ask all agents to inspect their ranks, or how their nodes are; return who answers.

        Until all nodes, or the given ones, have answered whose agents are there, or the time is
        over; raises as `receive`.
        """
        self._write(word)
        answers: dict[str, NodeReport] = {}
        until_s = time.monotonic() + (_LIMITS_S[word] if limit_s == math.inf else limit_s)
        while (left_s := until_s - time.monotonic()) > 0:
            if set(nodes or self.nodes) <= {*self.nodes_without_report(), *answers}:
                break
            for report in self.receive(min(0.2, left_s)):
                if report.state is not None if word == STATE else report.look is Look.INSPECTION:
                    answers[report.node] = report
        return answers

    def nodes_without_report(self) -> list[str]:
        """Return the nodes whose agent has been silent for too long, or has ended."""
        silent_s = time.monotonic() - _SILENT_S
        return [node for node in self.nodes if self._last_seen_s[node] < silent_s]

    def is_time_to_replace(self, silent: Sequence[str]) -> bool:
        """Whether agents that are gone may be started again: later and later while they are."""
        if not silent:
            self._pause_s = 0.0
        return bool(silent) and time.monotonic() >= self._again_s

    def replace(self, silent: Sequence[str]) -> None:
        """Start agents again on these nodes.

        Raises:
            OSError: they cannot be started.
        """
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._again_s = time.monotonic() + _STARTS_S + self._pause_s
        nodes = list(silent) if self._alone else list(self.nodes)
        for connection in list(self._connections):
            if set(connection.nodes) <= set(nodes):
                connection.end()
                self._connections.remove(connection)
        few = self._alone and len(nodes) <= _FEW
        for some in [[node] for node in nodes] if few else [nodes]:
            self.begin(some)

    def drop(self, nodes: Sequence[str]) -> None:
        """Expect nothing any more of nodes that the job has lost."""
        self.nodes = tuple(node for node in self.nodes if node not in nodes)

    def end(self) -> None:
        """End all agents."""
        for connection in self._connections:
            connection.end()
        self._connections.clear()

    def _write(self, word: bytes) -> None:
        for connection in self._connections:
            connection.write(word)


def start_in_job(
    job_id: int,
    nodes: Sequence[str],
    options: Sequence[str],
    environ: Mapping[str, str],
    *,
    here: str = "",
    stderr: int = NOTHING,
) -> Process:
    """Start the agents of some nodes of a job by srun; that of `here`, alone, needs no step.

    Steps overlap with the script's in their devices too: NVML shows them what ranks have.

    Raises:
        OSError: they cannot be started.
    """
    command = own_module("slurm_health.training.monitor.agent", f"--job={job_id}", *options)
    own = list(nodes) == [here]
    return start_tied(
        list(command) if own else step_argv(job_id, nodes, [], command),
        environ=environ if own else clean_environ(environ),
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        signal_mask=(),
    )


def start_carried(reading: int, writing: int, number: int, control: int) -> Carried:
    """Start the agents that torchrun runs; the `number` tells this start from those before.

    What agents sent before that is passed over.

    Raises:
        ScriptOver: the script has ended.
        AgentsEnded: nothing carries what they send any more.
        OSError: they do not start in time.
    """
    # The files are those of the next start, too.
    to_them = open(writing, "wb", buffering=0, closefd=False)  # noqa: SIM115
    from_them = open(reading, "rb", buffering=0, closefd=False)  # noqa: SIM115
    os.write(writing, b"start %d\n" % number)
    lines, until_s = LineBuffer(_MOST_LINE_BYTES), time.monotonic() + _CARRIED_STARTS_S
    while (left_s := until_s - time.monotonic()) > 0:
        ready, _, _ = select.select([control, reading], [], [], left_s)
        if control in ready and not os.read(control, 4096):
            raise ScriptOver
        if reading in ready:
            data = os.read(reading, 1 << 20)
            if not data:
                raise AgentsEnded
            if b"started %d" % number in lines.feed(data):
                return Carried(stdin=to_them, stdout=from_them)
    raise OSError("the agents of nodes do not start")
