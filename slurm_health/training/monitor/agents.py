# SPDX-License-Identifier: Apache-2.0
"""The agents of all nodes: start, ask, replace.

In a job one srun starts them, while its script runs and once more after it has failed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records.text import LineBuffer
from slurm_health.system.processes import (
    NOTHING,
    PIPE,
    Process,
    end_session,
    fork_tied,
    own_module,
    start_tied,
)
from slurm_health.system.slurm.command import clean_environ, step_argv
from slurm_health.training.diagnosis.samples import Look, NodeReport
from slurm_health.training.monitor import agent
from slurm_health.training.monitor.messages import (
    HERE,
    INSPECT,
    REACH,
    REPORTS,
    STATE,
    MessageReader,
)

HERE_S = 10.0  # between two signs of life of the watch
# For the answers of all nodes: an inspection samples twice, a state has a child's time limit, and a
# busy node takes longer.
_LIMITS_S = {INSPECT: 25.0, STATE: 8.0, REACH: 8.0}
_MOST_LINE_BYTES = 1 << 20
_LEAVE_S, _GRACE_S = 1.0, 0.5
_SILENT_S = 30.0  # six samples without a report
_STARTS_S = 20.0  # for srun and the interpreters
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # between two restarts of agents
_FEW = 8  # nodes: their agents start one by one, so that a lost node does not hold up the others


class ScriptOver(Exception):
    """The script has ended: no more reports are read."""


@dataclass(kw_only=True)
class Connection:
    """The agents of some nodes, by one start."""

    process: Process
    nodes: tuple[str, ...]
    lines: LineBuffer = field(default_factory=lambda: LineBuffer(_MOST_LINE_BYTES))
    reader: MessageReader[NodeReport] = field(default_factory=lambda: MessageReader(REPORTS))

    @property
    def pipe(self) -> int:
        """The file number of their lines."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def write(self, word: bytes) -> None:
        """Send a word to all of them."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.process.stdin.fileno(), word + b"\n")

    def end(self) -> None:
        """End them: they leave when their standard input ends."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            end_session(self.process, leave_s=_LEAVE_S, grace_s=_GRACE_S)


Start = Callable[[Sequence[str]], Process]


class Agents:
    """One agent per node.

    Args:
        start: starts those of some nodes; raises OSError.
        observe: receives every report.
        control: a file that ends when the script does, if there is one.
    """

    def __init__(
        self,
        start: Start,
        observe: Callable[[NodeReport], None] = lambda _: None,
        control: int | None = None,
    ) -> None:
        self._start = start
        self._observe = observe
        self._control = () if control is None else (control,)
        self._connections: list[Connection] = []
        self._reported_s: dict[str, float] = {}
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
        self._reported_s |= dict.fromkeys(nodes, starts_s)
        self.nodes = tuple(dict.fromkeys((*self.nodes, *nodes)))

    def receive(self, wait_s: float) -> list[NodeReport]:
        """Receive reports for `wait_s`.

        Raises:
            ScriptOver: the script has ended.
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
            connection.end()
            self._connections.remove(connection)
            others = {node for other in self._connections for node in other.nodes}
            lost = set(connection.nodes) & set(self.nodes) - others
            self._reported_s |= dict.fromkeys(lost, -math.inf)
        reports = []
        for line in connection.lines.feed(data):
            report = connection.reader.take(line)
            if report is not None and report.node in self.nodes:
                self._reported_s[report.node] = time.monotonic()
                self._observe(report)
                reports.append(report)
        return reports

    def ask(
        self, word: bytes, nodes: Sequence[str] = (), limit_s: float = math.inf
    ) -> dict[str, NodeReport]:
        """Ask all agents for an inspection, their node's state, or the addresses they reach.

        Returns the answers.

        Wait for all nodes, or the given ones, without a silent agent, at most for the time limit;
        raises as `receive`.
        """
        self._write(word)
        answers: dict[str, NodeReport] = {}
        what = word.split()[0]
        until_s = time.monotonic() + (_LIMITS_S[what] if limit_s == math.inf else limit_s)
        while (left_s := until_s - time.monotonic()) > 0:
            if set(nodes or self.nodes) <= {*self.nodes_without_report(), *answers}:
                break
            for report in self.receive(min(0.2, left_s)):
                is_answer = {
                    INSPECT: report.look is Look.INSPECTION,
                    STATE: report.state is not None,
                    REACH: report.reached is not None,
                }
                if is_answer[what]:
                    answers[report.node] = report
        return answers

    def nodes_without_report(self) -> list[str]:
        """Return the nodes whose agents have been silent for too long, or have ended."""
        silent_s = time.monotonic() - _SILENT_S
        return [node for node in self.nodes if self._reported_s[node] < silent_s]

    def is_time_to_replace(self, silent: Sequence[str]) -> bool:
        """Whether ended agents may start again: after longer and longer pauses."""
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
        nodes = list(silent)
        for connection in list(self._connections):
            if set(connection.nodes) <= set(nodes):
                connection.end()
                self._connections.remove(connection)
        for some in [[node] for node in nodes] if len(nodes) <= _FEW else [nodes]:
            self.begin(some)

    def drop(self, nodes: Sequence[str]) -> None:
        """Expect no more reports of nodes that the job has lost."""
        self.nodes = tuple(node for node in self.nodes if node not in nodes)

    def end(self) -> None:
        """End all agents."""
        for connection in self._connections:
            connection.end()
        self._connections.clear()

    def _write(self, word: bytes) -> None:
        for connection in self._connections:
            connection.write(word)


def start_here(options: Sequence[str], environ: Mapping[str, str]) -> Process:
    """Start the agent of this node, which needs no step, and little memory of its own.

    Raises:
        OSError: it cannot be started.
    """

    def serve() -> int:
        os.environ.clear()
        os.environ.update(environ)
        return agent.main(options)

    return fork_tied(serve)


def start_in_job(
    job_id: int,
    nodes: Sequence[str],
    options: Sequence[str],
    environ: Mapping[str, str],
    *,
    stderr: int = NOTHING,
) -> Process:
    """Start the agents of some nodes of a job by srun.

    Steps overlap with the script's in their devices too, so that NVML shows the ranks' GPUs.

    Raises:
        OSError: they cannot be started.
    """
    command = own_module("slurm_health.training.monitor.agent", f"--job={job_id}", *options)
    return start_tied(
        step_argv(job_id, nodes, [], command),
        environ=clean_environ(environ),
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        signal_mask=(),
    )
