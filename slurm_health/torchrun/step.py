# SPDX-License-Identifier: Apache-2.0
"""The processes of one start: each runs the agent of its node, the first one decides who trains.

The first one appends to one file for all, `step.jsonl`: which agents to start, that it is there,
and in the end who trains. The others read nothing else: the whole journal on each node would take
bytes by the square of their number. The records are the journal's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from slurm_health.preflight.master.launcher import LEAVE_S, AgentCommand
from slurm_health.preflight.master.master import SILENCE_S, poll_interval_s
from slurm_health.records import records
from slurm_health.records.errors import ChannelError, JournalError
from slurm_health.system import journal
from slurm_health.system.processes import (
    Process,
    close_pipes,
    end_session,
    read_available,
    start_tied,
)
from slurm_health.system.signals import exit_text
from slurm_health.torchrun.node_choice import why_left_out
from slurm_health.torchrun.place import TaskPlace

STEP = "step"
# How long the first process may take to begin: it may still be loading torch from a cold disk.
BEGIN_S = 180.0
# Of the usual interval between reads: the processes and their agents together then read no more
# often than agents alone do.
READ_SHARE = 2


@dataclass(frozen=True, kw_only=True)
class Start:
    """The nodes that training starts with, none if it does not.

    Args:
        nodes: in the order of their ranks.
        reason: why it is these.
        left_out: why other nodes do not train.
        addresses: of the first node and of those left out, as far as they are known.
        directory: of the check in the journal, None without one.
    """

    nodes: tuple[str, ...]
    reason: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None


class Unheard(JournalError):
    """The first process has written nothing, or nothing more."""


def used_before(directory: Path) -> JournalError:
    """Return the error for a start whose name another start had."""
    return JournalError(directory, "belongs to an earlier start; give each start its own --rdzv-id")


def directory_of(root: Path, place: TaskPlace) -> Path:
    """Return the directory of this start's journal, the same one in all its processes.

    Raises:
        JournalError: an older journal cannot be read.
    """
    try:
        name = journal.name_of(root, place.cluster, str(place.job_id), os.geteuid(), make=True)
    except OSError as err:
        raise journal.unusable(root, "written", err) from err
    job = journal.job_directory(root, place.cluster, name)
    return journal.directory_of_start(
        job, attempt=place.attempt, step=place.step, run_id=place.start
    )


class OwnAgent:
    """The agent of this node: a `Launcher` that leaves those of other nodes to their processes."""

    def __init__(self, node: str, command: AgentCommand, environ: Mapping[str, str]) -> None:
        self._node, self._command, self._environ = node, command, environ
        self._launch = -1
        self._process: Process | None = None
        self._errors = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent if this node is meant, in place of an earlier one."""
        if self._node in nodes:
            self.stop(0.0)
            self._launch, self._errors = launch, b""
            self._process = start_tied(self._command(launch, self._node), environ=self._environ)

    def poll(self) -> list[records.AgentsLost]:
        """Return the agent's end, once."""
        if self._process is None:
            return []
        returncode = self._process.poll()
        self._errors += read_available(self._process.stderr)
        if returncode is None:
            return []
        last = self._errors.decode(errors="replace").strip().splitlines()[-1:]
        close_pipes(self._process)
        self._process = None
        reason = f"its agent ended: {': '.join([exit_text(returncode), *last])}"
        return [records.AgentsLost(launch=self._launch, nodes=[self._node], reason=reason)]

    def ring(self) -> None:
        """Do nothing: agents read their orders by themselves."""

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:  # noqa: ARG002 - none rings
        """Wait."""
        time.sleep(timeout_s)
        return set()

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let the agent leave, which frees the devices, or end it."""
        if self._process is not None:
            end_session(self._process, leave_s=leave_s, grace_s=1.0)
            self._process = None


def follow(
    directory: Path,
    place: TaskPlace,
    agent: OwnAgent,
    raise_failure: Callable[[], None] = lambda: None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Start:
    """Take part in the check that the first process runs, until it is over.

    Raises:
        JournalError: the journal cannot be used, or the first process writes nothing any more.
        ChannelError: the first process was ended.
        Exception: whatever `raise_failure` raises, which is called again and again.
    """
    # The file exists before any process looks for it: no client of a network filesystem then
    # remembers that it did not.
    journal.create(directory, [STEP, place.node])
    reader = journal.Reader(directory, STEP)
    read: list[records.Record] = []
    last_s = monotonic()
    while True:
        raise_failure()
        news = [entry.record for entry in reader.read_new() if entry.record is not None]
        first, read = not read, read + news
        if (start := start_of(read, directory)) is not None:
            if first and place.chosen_start and place.meeting is None:
                raise used_before(directory)
            agent.stop()
            return start
        last_s = monotonic() if news else last_s
        if monotonic() - last_s > (SILENCE_S if read else BEGIN_S):
            raise Unheard(reader.path, _silent(place, begun=bool(read)))
        for record in news:
            if isinstance(record, records.AgentsLaunched):
                agent.start(record.launch, record.nodes)
            elif isinstance(record, records.MasterStopped):
                ended = f"the run was ended: it was ended by {record.reason}"
                raise ChannelError(place.nodes[0], ended)
        for lost in agent.poll():
            # The agent is gone, so its file still has one writer.
            journal.Writer(directory, place.node, time.time).append(
                records.AgentEnded(node=place.node, launch=lost.launch, reason=lost.reason)
            )
        sleep(READ_SHARE * poll_interval_s(len(place.nodes)))


def start_of(written: Iterable[records.Record], directory: Path) -> Start | None:
    """Return who trains, once the first process has written it whole."""
    nodes: tuple[str, ...] = ()
    left_out: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for record in written:
        match record:
            case records.AgentStarted(node=node, address=address):
                addresses[node] = address
            case records.VerdictReached(nodes=judged):
                left_out = {verdict.node: why_left_out(verdict) for verdict in judged}
            case records.ActionIntended(nodes=chosen):
                nodes = tuple(chosen)
            case records.JobOutcome(reason=reason):
                return Start(
                    nodes=nodes,
                    reason=reason,
                    left_out=left_out,
                    addresses=addresses,
                    directory=directory,
                )
            case _:
                pass
    return None


def _silent(place: TaskPlace, *, begun: bool) -> str:
    first = f"{place.nodes[0]}, which runs the check,"
    if begun:
        return f"{first} has written nothing for {SILENCE_S:.0f} s"
    return (
        f"{first} has not begun it within {BEGIN_S:.0f} s; is this a directory on a filesystem that"
        " all nodes share? (--journal DIR, SLURM_HEALTH_JOURNAL)"
    )
