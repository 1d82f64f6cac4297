# SPDX-License-Identifier: Apache-2.0
"""The check before a training that srun has started on every node already.

No agent is started from elsewhere: each process runs that of its own node when the orders say so,
and the first one runs the master beside it. The others learn from the orders who trains: to read
the whole journal on each node would take bytes by the square of their number.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.preflight import orders
from slurm_health.preflight.master.launcher import LEAVE_S, AgentCommand, Launcher
from slurm_health.preflight.master.master import SILENCE_S, Master, MasterSettings, poll_interval_s
from slurm_health.preflight.order_lines import names, numbers_of
from slurm_health.preflight.orders import Ringers, ring_all
from slurm_health.records import records
from slurm_health.records.errors import ExitCode, JournalError
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import AgentsLost
from slurm_health.system import journal
from slurm_health.system.processes import (
    PIPE,
    Process,
    close_pipes,
    end_session,
    read_available,
    start_tied,
)
from slurm_health.system.signals import exit_text
from slurm_health.torchrun.earlier_check import ADOPTED, EarlierCheck, verdict_of
from slurm_health.torchrun.node_choice import Bounds, NodeChoice, choose
from slurm_health.torchrun.place import TaskPlace

# How long the first process may take to begin: it may still be loading torch from a cold disk.
BEGIN_S = 180.0
# How often orders are looked for, as multiples of the usual interval: the two together ask no more
# of the filesystem than agents alone do. A process rings for its agent, which looks the less often.
LOOK_SHARE = 1.25
AGENTS_SHARE = 5
# How long processes may take to say that they have seen the verdict.
SIGN_OFF_S = 10.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class JointOutcome:
    """What the check found, and the nodes training starts with, none where it does not.

    What it found of other nodes is known to the first process alone.
    """

    verdict: records.VerdictReached
    choice: NodeChoice


class Unheard(JournalError):
    """The first process says nothing, or nothing any more."""


def directory_of(root: Path, place: TaskPlace) -> Path:
    """Return the directory of this start's journal: the same one in all its processes.

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


def lead(
    directory: Path,
    started: records.RunStarted,
    agent: Launcher,
    bounds: Bounds,
    settings: MasterSettings,
    *,
    exclude_slow: bool,
) -> JointOutcome:
    """Run the check for all processes, and decide who trains.

    Raises:
        JournalError: the journal cannot be read or written, or another start of the same name
            has been there.
    """
    if journal.read_all(directory, journal.MASTER):
        raise _used_before(directory)
    master = Master(directory, started.nodes, agent, settings)
    with master.led(started) as verdict:
        agent.stop()
        absent = _await_sign_off(directory, started.nodes[1:], agent)
        choice = choose(verdict, bounds, absent=absent, exclude_slow=exclude_slow)
        for record in _outcome_records(choice):
            master.append(record)
        _tell(directory, started, verdict, choice)
    return JointOutcome(verdict=verdict, choice=choice)


def adopt(
    directory: Path,
    started: records.RunStarted,
    earlier: EarlierCheck,
    bounds: Bounds,
    *,
    exclude_slow: bool,
) -> JointOutcome:
    """Decide who trains by what an earlier check found, and let all processes know.

    Raises:
        JournalError: the journal cannot be written, or another start of the same name has been
            there.
    """
    if journal.read_all(directory, journal.MASTER):
        raise _used_before(directory)
    here = [node for node in earlier.verdict.nodes if node.node in started.nodes]
    verdict = records.VerdictReached(nodes=here)
    choice = choose(verdict, bounds, absent=(), exclude_slow=exclude_slow)
    settings = {**started.settings, ADOPTED: earlier.directory.name}
    journal.create(directory, [journal.MASTER, *started.nodes])
    writer = journal.Writer(directory, journal.MASTER, time.time)
    writer.append(msgspec.structs.replace(started, settings=settings), *_outcome_records(choice))
    _tell(directory, started, verdict, choice)
    return JointOutcome(verdict=verdict, choice=choice)


def follow(
    directory: Path,
    place: TaskPlace,
    agent: OwnAgent,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JointOutcome:
    """Take part in the check that the first process runs, until it is over.

    Raises:
        JournalError: the journal cannot be used, or the first process says nothing any more.
    """
    # The file exists before any process looks for it: no client of a network filesystem then
    # remembers that it did not.
    journal.create(directory, [orders.ORDERS, place.node])
    reader = orders.OrderReader(directory, place.node)
    poll_s = LOOK_SHARE * poll_interval_s(len(place.nodes))
    heard_at = monotonic()
    heard = False
    while True:
        news = reader.read_new()
        if reader.training is not None:
            break
        if news:
            heard, heard_at = True, monotonic()
            agent.ring()
        if monotonic() - heard_at > (SILENCE_S if heard else BEGIN_S):
            raise Unheard(reader.path, _silent(place, heard=heard))
        serve(agent, directory, news)
        sleep(poll_s)
    if place.chosen_start and not heard:
        raise _used_before(directory)
    agent.stop()
    return _outcome(place.nodes, reader.training)


def _outcome(nodes: Sequence[str], training: orders.Training) -> JointOutcome:
    numbers = numbers_of(nodes)
    chosen = tuple(node for node in nodes if names(training.nodes, numbers[node]))
    found = [] if training.verdict is None else [training.verdict]
    choice = NodeChoice(nodes=chosen, reason=training.reason)
    return JointOutcome(verdict=records.VerdictReached(nodes=found), choice=choice)


def _tell(
    directory: Path,
    started: records.RunStarted,
    verdict: records.VerdictReached,
    choice: NodeChoice,
) -> None:
    writer = orders.OrderWriter(directory, started.run_id, started.nodes)
    writer.conclude(verdict, choice.nodes, choice.reason)


def serve(agent: OwnAgent, directory: Path, news: Iterable[records.Record | None]) -> None:
    """Start the agent when it is called for, and write its end where it could not itself."""
    for record in news:
        if isinstance(record, records.AgentsLaunched):
            agent.start(record.launch, record.nodes)
    for lost in agent.poll():
        (node,) = lost.nodes
        # The agent is gone, so its file still has one writer.
        writer = journal.Writer(directory, node, time.time)
        writer.append(records.AgentEnded(node=node, launch=lost.launch, reason=lost.reason))


def _used_before(directory: Path) -> JournalError:
    return JournalError(directory, "belongs to an earlier start; give each start its own --rdzv-id")


def _silent(place: TaskPlace, *, heard: bool) -> str:
    first = place.nodes[0]
    if heard:
        return f"{first}, which runs the check, has written nothing for {SILENCE_S:.0f} s"
    return (
        f"{first}, which runs the check, has not begun it within {BEGIN_S:.0f} s; is this a"
        " directory on a filesystem that all nodes share? (--journal DIR, SLURM_HEALTH_JOURNAL)"
    )


def _await_sign_off(directory: Path, nodes: Sequence[str], agent: Launcher) -> list[str]:
    """Return the nodes whose processes do not answer: their last record is not an agent's end."""
    give_up = time.monotonic() + SIGN_OFF_S
    left = {node: journal.Reader(directory, node) for node in nodes}
    while left:
        last: dict[str, records.Record | None] = {}
        for entry in journal.read_new_of(directory, list(left.values())):
            last[entry.id.rpartition(":")[0]] = entry.record
        for node, record in last.items():
            if isinstance(record, records.AgentEnded):
                left.pop(node, None)
        if not left or time.monotonic() > give_up:
            break
        agent.wait(poll_interval_s(len(nodes)), 0.0)
    return list(left)


def _outcome_records(choice: NodeChoice) -> list[records.Record]:
    """Return what tells all processes who trains."""
    go = bool(choice.nodes)
    finished = records.JobOutcome(
        disposition=records.Disposition.PROCEED if go else records.Disposition.STOP,
        exit_code=ExitCode.HEALTHY if go else ExitCode.BAD_NODES,
        reason=choice.reason,
    )
    if not go:
        return [finished]
    nodes = list(choice.nodes)
    return [
        records.ActionIntended(action=records.Action.PROCEED, nodes=nodes, reason=choice.reason),
        finished,
    ]


def outcome_of(entries: Sequence[Entry], directory: Path) -> JointOutcome | None:
    """Return the outcome once the first process has written it whole."""
    verdict: records.VerdictReached | None = None
    nodes: tuple[str, ...] = ()
    for entry in entries:
        match entry.record:
            case records.RunStarted() as record:
                verdict = verdict_of(directory, record)
            case records.VerdictReached() as record:
                verdict = record
            case records.ActionIntended(action=records.Action.PROCEED, nodes=names):
                nodes = tuple(names)
            case records.JobOutcome(reason=reason) if verdict is not None:
                return JointOutcome(verdict=verdict, choice=NodeChoice(nodes=nodes, reason=reason))
            case _:
                pass
    return None


class OwnAgent:
    """A `Launcher` that leaves the agents of the other nodes to their own processes."""

    def __init__(self, node: str, command: AgentCommand, environ: Mapping[str, str]) -> None:
        self._node = node
        self._command = command
        self._environ = environ
        self._launch = -1
        self._process: Process | None = None
        self._said = b""
        self._ringers = Ringers()
        self._deaf = False

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent if this node is meant, in place of an earlier one."""
        if self._node in nodes:
            self.stop(0.0)
            self._launch = launch
            self._process = start_tied(
                self._command(launch, self._node), environ=self._environ, stdin=PIPE, stdout=PIPE
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            self._ringers, self._deaf = Ringers(), False

    def poll(self) -> list[AgentsLost]:
        """Return the agent's end, once."""
        if self._process is None:
            return []
        returncode = self._process.poll()
        self._said += read_available(self._process.stderr)
        if returncode is None:
            return []
        said = self._said.decode(errors="replace").strip().splitlines()[-1:]
        close_pipes(self._process)
        self._process, self._said = None, b""
        reason = f"its agent ended: {': '.join([exit_text(returncode), *said])}"
        return [AgentsLost(launch=self._launch, nodes=[self._node], reason=reason)]

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the agent rings; None while it cannot."""
        if self._process is None or self._process.stdout is None or self._deaf:
            return None
        return self._process.stdout.fileno()

    def hear(self) -> set[str]:
        """Return this node if the agent has rung since the last call."""
        if (bell := self.descriptor) is None:
            return set()
        try:
            data = os.read(bell, _READ_BYTES)
        except BlockingIOError:
            return set()
        self._deaf = not data
        return {self._node}.intersection(self._ringers.rung(data))

    def ring(self) -> None:
        """Tell the agent that there are orders; the others look by themselves."""
        if self._process is not None and self._process.stdin is not None:
            ring_all(self._process.stdin.fileno())

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:  # noqa: ARG002 - only one rings
        """Wait for the agent's ring."""
        if (bell := self.descriptor) is None:
            time.sleep(timeout_s)
            return set()
        ready, _, _ = select.select([bell], [], [], timeout_s)
        return self.hear() if ready else set()

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let the agent leave, which frees the devices, or end it."""
        if self._process is not None:
            end_session(self._process, leave_s=leave_s, grace_s=1.0)
            self._process, self._said = None, b""
