# SPDX-License-Identifier: Apache-2.0
"""Start an agent per node, as a Slurm step or as local processes, and notice when they end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import selectors
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from slurm_health.preflight.agent.node_facts import environ_of_each, visible_devices
from slurm_health.preflight.orders import News, Ringers, ring_all
from slurm_health.records.errors import SlurmCommandMissing, SlurmError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.records import AgentsLost, LossCause
from slurm_health.records.text import LineBuffer
from slurm_health.system import processes
from slurm_health.system.signals import exit_text
from slurm_health.system.slurm.command import clean_environ, step_argv
from slurm_health.system.slurm.job_gres import NodeGres, may_have_gpus, shares

log = logging.getLogger(__name__)

# How long agents may take to leave before they are killed. A process that has used NCCL takes
# seconds to give its devices back; after a kill, the driver decides when they are free.
LEAVE_S = 20.0
_GRACE_S = 2.0  # after SIGTERM
_LOOK_S = 0.02  # between two looks whether they have left

# When Slurm ends a job it sends SIGTERM to all of its processes, to this one a moment earlier or
# later. So agents that end by SIGTERM are reported after this time only.
JOB_END_S = 3.0

# For rings that are not read at once. Users may have this much by default (pipe(7)).
_PIPE_BYTES = 1 << 20

AgentCommand = Callable[[int, str | None], list[str]]
"""Command line of an agent of launch K; of a given node, or of the node Slurm runs it on.

More of the agent's options may follow it.
"""

ReadGres = Callable[[], Mapping[str, NodeGres]]
"""Return what the job has on its nodes; raise SlurmError if Slurm does not answer."""


class Launcher(Protocol):
    """Starts agents. `poll` never blocks."""

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start an agent on every node."""

    def poll(self) -> list[AgentsLost]:
        """Return what has ended, or failed to start, since the last call."""

    def ring(self) -> None:
        """Notify all agents of new orders. Never waits."""

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:
        """Wait until a node rings, and `gather_s` for others to ring too; return their news.

        An agent that has written something new rings. Some rings get lost.
        """

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Wait for the agents to leave; end those that have not within this time."""


@dataclass
class _Command:
    """A running command and the nodes that it serves."""

    launch: int
    nodes: tuple[str, ...]
    process: processes.Process
    pending: set[str]
    own_words: dict[str, str] = field(default_factory=dict)  # of agents, by node
    short_of_files: bool = False
    lines: LineBuffer = field(default_factory=LineBuffer)
    unread: list[bytes] = field(default_factory=list)
    last_line: str = ""
    ringers: Ringers = field(default_factory=Ringers)
    closed: set[int] = field(default_factory=set)

    @cached_property
    def members(self) -> frozenset[str]:
        """The same nodes, for look-ups among thousands."""
        return frozenset(self.nodes)

    @property
    def streams(self) -> list[int]:
        """The open streams of the command."""
        pipes = [self.process.stdout, self.process.stderr]
        return [pipe.fileno() for pipe in pipes if pipe and pipe.fileno() not in self.closed]

    def receive(self, stream: int) -> list[News]:
        """Read a stream; return the news of nodes that rang."""
        try:
            data = os.read(stream, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.closed.add(stream)
        if self.process.stderr and stream == self.process.stderr.fileno():
            self.unread += self.lines.feed(data)
            return []
        return [news for news in self.ringers.rung(data) if news.node in self.members]

    def read_lines(self) -> list[str]:
        """Return the new complete lines of standard error."""
        lines = self.unread + self.lines.feed(processes.read_available(self.process.stderr))
        self.unread = []
        return [line.decode(errors="replace").strip() for line in lines]

    def lost(
        self, nodes: Iterable[str], reason: str, cause: LossCause = LossCause.ENDED
    ) -> AgentsLost:
        """Return the loss of these nodes' agents, which are no longer pending."""
        nodes = list(nodes)
        self.pending.difference_update(nodes)
        return AgentsLost(launch=self.launch, nodes=nodes, reason=reason, cause=cause)

    def ended(self, node: str, how: str) -> AgentsLost:
        """Return the loss of an agent that ended; its own words, if any, are about the journal."""
        if words := self.own_words.get(node):
            return self.lost([node], words, LossCause.NO_JOURNAL)
        return self.lost([node], f"its agent ended: {how}")


class _Commands:
    """The commands that run agents."""

    def __init__(self) -> None:
        self._commands: list[_Command] = []

    def _run(
        self, launch: int, nodes: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        process = processes.start_tied(
            argv, environ=environ, stdin=processes.PIPE, stdout=processes.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # the user's pipes are at their limit
            fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._commands.append(_Command(launch, tuple(nodes), process, set(nodes)))

    def _news(self) -> list[tuple[_Command, list[str], int | None]]:
        """Return the new lines of every command, and its exit status once it has ended."""
        news = []
        for command in list(self._commands):
            returncode = command.process.poll()  # before reading: it writes nothing afterwards
            lines = command.read_lines()
            for line in lines:  # first: an agent's words often follow srun's line about its end
                if words := _AGENT_WORDS.search(line):
                    command.own_words[words["node"]] = words["text"]
            if returncode is not None:
                self._commands.remove(command)
                processes.close_pipes(command.process)
            news.append((command, lines, returncode))
        return news

    def ring(self) -> None:
        """Send a line to all agents."""
        for command in self._commands:
            assert command.process.stdin is not None
            ring_all(command.process.stdin.fileno())

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:
        """Wait for rings or output, and `gather_s` for more of them; return what was rung."""
        rung: list[News] = []
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for command in self._commands:
                for stream in command.streams:
                    selector.register(stream, selectors.EVENT_READ, command)
            while True:
                left_s = until_s - time.monotonic()
                ready = selector.select(max(0.0, left_s))
                for key, _ in ready:
                    rung += key.data.receive(key.fd)
                    if key.fd in key.data.closed:
                        selector.unregister(key.fd)
                if not ready or left_s <= 0.0:
                    return rung
                until_s = min(until_s, time.monotonic() + gather_s)

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let the agents leave, or end them; log the nodes whose agents left too late."""
        until_s = time.monotonic() + leave_s
        left_s = leave_s
        while left_s > 0.0 and any(command.process.poll() is None for command in self._commands):
            # srun ends once what agents have printed is read; others may hold a stream for longer.
            self.wait(min(left_s, _LOOK_S), 0.0)
            left_s = until_s - time.monotonic()
        late = processes.end_sessions(
            [command.process for command in self._commands],
            leave_s=max(0.0, left_s),
            grace_s=_GRACE_S,
        )
        if leave_s and late:
            nodes = [node for c in self._commands if c.process in late for node in c.nodes]
            log.warning("killed agents that did not leave within %g s: %s", leave_s, fold(nodes))
        self._commands.clear()


class SlurmLauncher(_Commands):
    """Agents as the tasks of one `srun` for all nodes of a launch.

    If the job's nodes differ in their GPUs, nodes with the same GPUs share an srun; on Slurm 22.05
    every node has its own.
    """

    def __init__(
        self,
        job_id: int,
        agent_command: AgentCommand,
        environ: Mapping[str, str],
        read_gres: ReadGres,
    ) -> None:
        super().__init__()
        self._job_id = job_id
        self._agent_command = agent_command
        self._environ = clean_environ(environ)
        self._read_gres = read_gres
        self._gres: Mapping[str, NodeGres] | None = None if may_have_gpus(environ) else {}
        self._by_sigterm: list[tuple[float, AgentsLost]] = []
        if shutil.which("srun", path=environ.get("PATH")) is None:
            raise SlurmCommandMissing("srun")

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start an agent on every node, with every GPU that the job has there."""
        if self._gres is None:
            try:
                self._gres = self._read_gres()
            except SlurmError as err:
                log.warning("agents may miss GPUs, those of the job are unknown: %s", err)
                self._gres = {}
        command = self._agent_command(launch, None)
        for share in shares(nodes, self._gres):
            words = [*command, f"--gpus={share.gpus}"]
            argv = step_argv(self._job_id, share.nodes, share.options, words)
            self._run(launch, share.nodes, argv, self._environ)

    def poll(self) -> list[AgentsLost]:
        """Return the tasks that ended or did not start according to srun, and the end of srun.

        Losses by SIGTERM wait `JOB_END_S`: this process ends with the job, too.
        """
        lost = []
        for step, lines, returncode in self._news():
            step.short_of_files |= any(_FEW_FILES.search(line) for line in lines)
            for line in lines:
                lost += _losses_in(line, step)
            if returncode is not None and step.pending:
                why = step.last_line or f"srun ended with {exit_text(returncode)}"
                cause = LossCause.JOB_ENDED if _JOB_ENDED.search(why) else LossCause.ENDED
                lost.append(step.lost(sorted(step.pending), why, cause))
        now_s = time.monotonic()
        due = []
        for loss in lost:
            if loss.cause is LossCause.ENDED and _BY_SIGTERM.search(loss.reason):
                self._by_sigterm.append((now_s, loss))
            else:
                due.append(loss)
        due += [loss for since_s, loss in self._by_sigterm if now_s - since_s >= JOB_END_S]
        self._by_sigterm = [(s, loss) for s, loss in self._by_sigterm if now_s - s < JOB_END_S]
        # One node on which a step does not start ends it everywhere, a line of srun per node.
        alike: dict[tuple[int, str, LossCause], list[str]] = {}
        for loss in due:
            alike.setdefault((loss.launch, loss.reason, loss.cause), []).extend(loss.nodes)
        return [
            AgentsLost(launch=launch, nodes=nodes, reason=reason, cause=cause)
            for (launch, reason, cause), nodes in alike.items()
        ]


class ChildLauncher(_Commands):
    """Agents as children of this process, each in the environment of its node; no others."""

    def __init__(
        self, agent_command: AgentCommand, environs: Mapping[str, Mapping[str, str]]
    ) -> None:
        super().__init__()
        self._agent_command = agent_command
        self._environs = environs

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start an agent process for each of our nodes that is meant."""
        for node in [node for node in nodes if node in self._environs]:
            self._run(launch, [node], self._agent_command(launch, node), self._environs[node])

    def poll(self) -> list[AgentsLost]:
        """Return the agents that have ended."""
        lost = []
        for agent, lines, returncode in self._news():
            agent.last_line = next((line for line in reversed(lines) if line), agent.last_line)
            if returncode is not None:
                how = exit_text(returncode) + (f": {agent.last_line}" if agent.last_line else "")
                lost += [agent.ended(node, how) for node in agent.nodes]
        return lost


class LocalLauncher(ChildLauncher):
    """Agents as processes of this machine; each plays one of `nodes` on its share of devices."""

    def __init__(
        self, agent_command: AgentCommand, environ: Mapping[str, str], nodes: Sequence[str]
    ) -> None:
        cpus = max(1, len(os.sched_getaffinity(0)) // len(nodes))
        common = {
            **clean_environ(environ),
            # As srun sets it to where it was started; here all nodes are on the loopback.
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_CPUS_ON_NODE": str(cpus),
        }
        devices = environ_of_each(nodes, visible_devices(environ))
        super().__init__(agent_command, {node: {**common, **devices[node]} for node in nodes})


# Lines of srun on standard error. The wording is the same from 22.05 to 26.05.
_TASK_ENDED = re.compile(r"srun: error: (?P<nodes>\S+): tasks? [\d,-]+: (?P<how>.+)")
_NOT_STARTED = re.compile(r"Task launch for \S+ failed on node (?P<nodes>\S+): (?P<how>.+)")
_BY_SIGTERM = re.compile(r"ended: Terminated$|ended with SIGTERM|Job step aborted")
_FEW_FILES = re.compile(r"srun: error: .*Too many open files")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<nodes>\S+)")
_SHORT_OF_FILES = "srun may not open enough files for so many nodes; raise the limit (ulimit -Hn)"
_JOB_ENDED = re.compile(r"job \d+ has expired")
_AGENT_WORDS = re.compile(r"slurm-health agent: (?P<node>\S+): (?P<text>.+)")


def _losses_in(line: str, step: _Command) -> list[AgentsLost]:
    """Return the agents that are lost according to a line of srun."""
    if _AGENT_WORDS.search(line):
        return []
    if "srun: error:" in line:
        step.last_line = line.split("srun: error:", 1)[1].strip()
    for pattern in (_TASK_ENDED, _NOT_STARTED, _NODE_FAILED):
        if match := pattern.search(line):
            break
    else:
        return []
    try:
        nodes = [node for node in expand(match["nodes"]) if node in step.members]
    except ValueError:
        nodes = []
    if pattern is _TASK_ENDED:
        return [step.ended(node, match["how"]) for node in nodes]
    if pattern is _NODE_FAILED:
        return [step.lost(nodes, "node failure", LossCause.NOT_STARTED)]
    if step.short_of_files:  # which is not about any node
        return [step.lost(nodes, _SHORT_OF_FILES)]
    return [step.lost(nodes, match["how"], LossCause.NOT_STARTED)]
