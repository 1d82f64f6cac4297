# SPDX-License-Identifier: Apache-2.0
"""Start one agent per node, as one Slurm step or as local processes, and notice when they end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import selectors
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from slurm_health.preflight.agent.node_facts import environ_of_each, visible_devices
from slurm_health.preflight.orders import Ringers, ring_all
from slurm_health.records.errors import SlurmCommandMissing, SlurmError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.records import AgentsLost, LossCause
from slurm_health.records.text import LineBuffer
from slurm_health.system import processes
from slurm_health.system.signals import exit_text
from slurm_health.system.slurm.command import clean_environ, step_argv
from slurm_health.system.slurm.job_gres import NodeGres, may_have_gpus, shares

log = logging.getLogger(__name__)

# How long agents may take to leave before they are killed, which leaves it to the driver when the
# devices are free: a process that has used NCCL takes seconds to give them back.
LEAVE_S = 20.0
_GRACE_S = 2.0  # from their SIGTERM on

# Where Slurm ends a job it sends SIGTERM to all of its processes, to this one a moment earlier or
# later: whose agents end by it is told to wait that long for its own.
JOB_END_S = 3.0

# What rings may wait in while nobody reads them, as when agents are left to end: 30 bytes for each
# of more nodes than there are. Users may have this much by default (pipe(7)).
_PIPE_BYTES = 1 << 20

AgentCommand = Callable[[int, str | None], list[str]]
"""Command line of an agent of launch K; of a given node, or of the node Slurm runs it on.

More of the agent's options may follow it.
"""

ReadGres = Callable[[], Mapping[str, NodeGres]]
"""What the job has on each of its nodes; raises SlurmError where Slurm does not say."""


class Launcher(Protocol):
    """Starts agents. `poll` never blocks."""

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start one agent on each node."""

    def poll(self) -> list[AgentsLost]:
        """Return what has ended, or failed to start, since the last call."""

    def ring(self) -> None:
        """Tell all agents that there are orders. Never waits."""

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:
        """Return when this time is over, or so long after a node rang that others may have too.

        Whoever has written something new rings. Not every ring arrives.
        """

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Return when the agents have left; end those that have not within this time."""


@dataclass
class _Started:
    """One running command and the nodes it serves."""

    launch: int
    nodes: tuple[str, ...]
    process: processes.Process
    pending: set[str]
    said: dict[str, str] = field(default_factory=dict)
    short_of_files: bool = False
    lines: LineBuffer = field(default_factory=LineBuffer)
    unread: list[bytes] = field(default_factory=list)
    last_line: str = ""
    ringers: Ringers = field(default_factory=Ringers)
    ended: set[int] = field(default_factory=set)

    @cached_property
    def members(self) -> frozenset[str]:
        """The same nodes, to look them up among thousands."""
        return frozenset(self.nodes)

    @property
    def streams(self) -> list[int]:
        """What becomes readable when the command, or an agent behind it, says something."""
        pipes = [self.process.stdout, self.process.stderr]
        return [pipe.fileno() for pipe in pipes if pipe and pipe.fileno() not in self.ended]

    def hear(self, stream: int) -> Set[str]:
        """Take in what has arrived on a stream; return the nodes that rang."""
        try:
            data = os.read(stream, 1 << 16)
        except BlockingIOError:
            return set()
        if not data:
            self.ended.add(stream)
        if self.process.stderr and stream == self.process.stderr.fileno():
            self.unread += self.lines.feed(data)
            return set()
        return self.members.intersection(self.ringers.rung(data))

    def read_lines(self) -> list[str]:
        """Return the complete lines the command has written to standard error."""
        lines = self.unread + self.lines.feed(processes.read_available(self.process.stderr))
        self.unread = []
        return [line.decode(errors="replace").strip() for line in lines]


class _Running:
    """The commands that run agents, whatever they are."""

    def __init__(self) -> None:
        self._started: list[_Started] = []

    def _start(
        self, launch: int, nodes: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        process = processes.start_tied(
            argv, environ=environ, stdin=processes.PIPE, stdout=processes.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # the user has as much in pipes as is allowed
            fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._started.append(_Started(launch, tuple(nodes), process, set(nodes)))

    def _ended(self) -> list[tuple[_Started, list[str], int | None]]:
        """Return what each command has written to standard error, and its exit status if it ended.

        One that has ended is not asked again.
        """
        news = []
        for each in list(self._started):
            returncode = each.process.poll()  # before reading: nothing is written after it
            lines = each.read_lines()
            for line in lines:  # first: what an agent says often comes after srun's word of its end
                if said := _AGENT_SAYS.search(line):
                    each.said[said["node"]] = said["text"]
            if returncode is not None:
                self._started.remove(each)
                processes.close_pipes(each.process)
            news.append((each, lines, returncode))
        return news

    def ring(self) -> None:
        """Send a line to all agents."""
        for each in self._started:
            assert each.process.stdin is not None
            ring_all(each.process.stdin.fileno())

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:
        """Wait for rings, for others that follow within `gather_s`, and for what a command says."""
        rung: set[str] = set()
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for each in self._started:
                for stream in each.streams:
                    selector.register(stream, selectors.EVENT_READ, each)
            while True:
                left_s = until_s - time.monotonic()
                ready = selector.select(max(0.0, left_s))
                for key, _ in ready:
                    rung |= key.data.hear(key.fd)
                    if key.fd in key.data.ended:
                        selector.unregister(key.fd)
                if not ready or left_s <= 0.0:
                    return rung
                until_s = min(until_s, time.monotonic() + gather_s)

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let the agents leave, or end them; say on which nodes they had time to, and did not."""
        late = processes.end_sessions(
            [each.process for each in self._started], leave_s=leave_s, grace_s=_GRACE_S
        )
        if leave_s and late:
            nodes = [node for each in self._started if each.process in late for node in each.nodes]
            log.warning(
                "agents on %s have not left within %g s and were killed", fold(nodes), leave_s
            )
        self._started.clear()


class SlurmLauncher(_Running):
    """Agents as the tasks of one `srun` for all nodes of a launch.

    Where the job's nodes differ in the GPUs it has there, those that have the same have one srun,
    or on Slurm 22.05 each has its own.
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
        """Start one agent on each node, where it sees every GPU that the job has there."""
        if self._gres is None:
            try:
                self._gres = self._read_gres()
            except SlurmError as err:
                log.warning("which GPUs the job has is not known, agents may see fewer: %s", err)
                self._gres = {}
        command = self._agent_command(launch, None)
        for share in shares(nodes, self._gres):
            words = [*command, f"--gpus={share.gpus}"]
            argv = step_argv(self._job_id, share.nodes, share.options, words)
            self._start(launch, share.nodes, argv, self._environ)

    def poll(self) -> list[AgentsLost]:
        """Return what srun says of tasks that ended or did not start, and its own end."""
        lost = []
        for step, lines, returncode in self._ended():
            step.short_of_files |= any(_FEW_FILES.search(line) for line in lines)
            for line in lines:
                lost += _heard(step, line)
            if returncode is not None and step.pending:
                why = step.last_line or f"srun ended with {exit_text(returncode)}"
                over = LossCause.JOB_ENDED if _JOB_ENDED.search(why) else LossCause.ENDED
                lost.append(_lost(step, sorted(step.pending), why, over))
        return _together(self._not_of_the_jobs_end(lost))

    def _not_of_the_jobs_end(self, lost: Iterable[AgentsLost]) -> list[AgentsLost]:
        """Return losses, those by SIGTERM after a while: with the job this process ends too."""
        now_s = time.monotonic()
        at_once = []
        for each in lost:
            if each.cause is LossCause.ENDED and _BY_SIGTERM.search(each.reason):
                self._by_sigterm.append((now_s, each))
            else:
                at_once.append(each)
        due = [each for since_s, each in self._by_sigterm if now_s - since_s >= JOB_END_S]
        self._by_sigterm = [each for each in self._by_sigterm if each[1] not in due]
        return [*at_once, *due]


class LocalLauncher(_Running):
    """Agents as processes of this machine, each playing one of `nodes` on its share of devices."""

    def __init__(
        self, agent_command: AgentCommand, environ: Mapping[str, str], nodes: Sequence[str]
    ) -> None:
        super().__init__()
        self._agent_command = agent_command
        cpus = max(1, len(os.sched_getaffinity(0)) // len(nodes))
        self._environ = {
            **clean_environ(environ),
            # As srun tells its tasks where it was started; here all nodes are on the loopback.
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURM_CPUS_ON_NODE": str(cpus),
        }
        self._devices_of = environ_of_each(nodes, visible_devices(environ))

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start one agent process per node."""
        for node in nodes:
            environ = {**self._environ, **self._devices_of[node]}
            self._start(launch, [node], self._agent_command(launch, node), environ)

    def poll(self) -> list[AgentsLost]:
        """Return the agents that have ended."""
        lost = []
        for agent, lines, returncode in self._ended():
            agent.last_line = next((line for line in reversed(lines) if line), agent.last_line)
            if returncode is not None:
                said = f": {agent.last_line}" if agent.last_line else ""
                lost += [_end_of(agent, node, exit_text(returncode) + said) for node in agent.nodes]
        return lost


# What srun writes to standard error. The wording is the same from 22.05 to 26.05.
_TASK_ENDED = re.compile(r"srun: error: (?P<nodes>\S+): tasks? [\d,-]+: (?P<how>.+)")
_NOT_STARTED = re.compile(r"Task launch for \S+ failed on node (?P<nodes>\S+): (?P<how>.+)")
_BY_SIGTERM = re.compile(r"ended: Terminated$|ended with SIGTERM|Job step aborted")
_FEW_FILES = re.compile(r"srun: error: .*Too many open files")
_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<nodes>\S+)")
_SHORT_OF_FILES = "srun may not open enough files for so many nodes; raise the limit (ulimit -Hn)"
_JOB_ENDED = re.compile(r"job \d+ has expired")
_AGENT_SAYS = re.compile(r"slurm-health agent: (?P<node>\S+): (?P<text>.+)")


def _heard(step: _Started, line: str) -> list[AgentsLost]:
    """Take in one line of srun's own."""
    if _AGENT_SAYS.search(line):
        return []
    if "srun: error:" in line:
        step.last_line = line.split("srun: error:", 1)[1].strip()
    found = _TASK_ENDED.search(line)
    if found:
        return [_end_of(step, node, found["how"]) for node in _names(found["nodes"], step)]
    found = _NOT_STARTED.search(line)
    if found and step.short_of_files:  # which says nothing of any node
        return [_lost(step, _names(found["nodes"], step), _SHORT_OF_FILES)]
    if found:
        return [_lost(step, _names(found["nodes"], step), found["how"], LossCause.NOT_STARTED)]
    found = _NODE_FAILED.search(line)
    if found:
        return [_lost(step, _names(found["nodes"], step), "node failure", LossCause.NOT_STARTED)]
    return []


def _end_of(step: _Started, node: str, how: str) -> AgentsLost:
    """Say why an agent ended: in its own words, which are about the journal, if it left any."""
    said = step.said.get(node)
    if said:
        return _lost(step, [node], said, LossCause.NO_JOURNAL)
    return _lost(step, [node], f"its agent ended: {how}")


def _names(text: str, step: _Started) -> list[str]:
    try:
        return [node for node in expand(text) if node in step.members]
    except ValueError:
        return []


def _together(lost: Iterable[AgentsLost]) -> list[AgentsLost]:
    """Return losses with one record for all nodes of which the same is known.

    One node on which a step does not start ends it everywhere, and srun says so node by node.
    """
    alike: dict[tuple[int, str, LossCause], list[str]] = {}
    for each in lost:
        alike.setdefault((each.launch, each.reason, each.cause), []).extend(each.nodes)
    return [
        AgentsLost(launch=launch, nodes=nodes, reason=reason, cause=cause)
        for (launch, reason, cause), nodes in alike.items()
    ]


def _lost(
    step: _Started, nodes: Sequence[str], reason: str, cause: LossCause = LossCause.ENDED
) -> AgentsLost:
    step.pending.difference_update(nodes)
    return AgentsLost(launch=step.launch, nodes=list(nodes), reason=reason, cause=cause)
