# SPDX-License-Identifier: Apache-2.0
"""The check of nodes that share no directory: node 0 has the journal, the others talk with it.

A node's agent has a directory of its own, with its file and its orders; they come and go over the
channel. Master and agents run as they do anywhere else. The nodes of a run may share a secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_health import __version__
from slurm_health.preflight import orders
from slurm_health.preflight.master.launcher import AgentCommand, Launcher
from slurm_health.records.errors import (
    ChannelError,
    ConfigError,
    JournalError,
    NoRoom,
    SlurmHealthError,
)
from slurm_health.records.nodeset import fold
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import AgentStarted, Record, RoundStarted
from slurm_health.records.text import one_line
from slurm_health.report import find
from slurm_health.system import journal
from slurm_health.system.signals import signal_behind
from slurm_health.torchrun import joint_check
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.node_zero import NodeZero
from slurm_health.torchrun.channel.other_node import JOIN_S, OtherNode
from slurm_health.torchrun.channel.peers import SharedRun
from slurm_health.torchrun.joint_check import JointOutcome, OwnAgent
from slurm_health.torchrun.place import TaskPlace

# Where fewer nodes will do, so long for the next one; torchrun waits as long for more of them.
LAST_CALL_S = 30.0
# An agent that does not ring is looked after so often.
_LOOK_S = 0.1

Say = Callable[[str], None]
KEY_VARIABLE = "SLURM_HEALTH_SECRET"
KEY_OPTION = "secret-file"
# One who has seen a handshake could find a shorter one by trying.
_LEAST_KEY_BYTES = 16
_MOST_KEY_BYTES = 65536
_KUBERNETES = "defaultMode: 0400 of the secret's volume"
_MAKE_ONE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all nodes of a run must agree on, and the secret that they share, if any."""

    nnodes: str
    check: str
    rdzv_id: str
    secret: bytes


def named(place: TaskPlace) -> TaskPlace:
    """Return node 0's place with a name for this start, so that the same command can come again.

    One `--rdzv-id` at one meeting point is one job, each of whose starts has a journal; without it
    each start is a job.
    """
    assert place.meeting is not None
    start = secrets.token_hex(4)
    job = start if place.start == "none" else f"{place.start} {place.meeting.text}"
    return replace(place, start=start, job_id=zlib.crc32(job.encode()))


@contextlib.contextmanager
def led(
    place: TaskPlace, directory: Path, terms: Terms, least: int, agent: OwnAgent, say: Say
) -> Iterator[Launcher]:
    """Open node 0's port, wait for the others, and provide the launcher of all agents.

    However this ends, the others hear of it.

    Raises:
        ChannelError: the port is taken, or may not be opened.
    """
    meeting = _meeting(place)
    run = SharedRun(
        directory=directory,
        run_id=place.start,
        job_id=place.job_id,
        nodes=place.nodes,
        nnodes=terms.nnodes,
        check=terms.check,
        rdzv_id=terms.rdzv_id,
    )
    node_zero = NodeZero(meeting, terms.secret, run, agent, say)
    try:
        missing = node_zero.await_nodes(least, join_s=JOIN_S, last_call_s=LAST_CALL_S)
        if missing:
            say(f"beginning without {fold(missing)}: nothing has connected to {meeting.text}")
        else:
            say(f"all nodes are there; the journal is here: slurm-health report {place.job_id}")
        yield node_zero
        node_zero.finish()
    except JournalError as err:
        node_zero.end(str(err), unchecked=True)
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        node_zero.end(f"{place.node} was ended by {signal_behind(end)}")
        raise
    except BaseException as err:
        node_zero.end(f"{place.node}: {err}")
        raise
    finally:
        node_zero.close()


def take_part(
    place: TaskPlace,
    terms: Terms,
    command: Callable[[Path, str], AgentCommand],
    environ: Callable[[str], Mapping[str, str]],
    journal_root: Path,
    say: Say,
) -> tuple[JointOutcome, dict[str, str]]:
    """Take part in the check that node 0 runs, until it is over.

    Args:
        place: this node's.
        terms: what all nodes agree on.
        command: how the agent is started, by its directory and the run's id.
        environ: its environment, by this node's address.
        journal_root: where a report on this machine is looked for.
        say: tells the user.

    Returns:
        The outcome, and addresses of nodes that training depends on.

    Raises:
        UsageError: node 0 refuses this node.
        JournalError: node 0 cannot use its journal.
        ChannelError: node 0 cannot be reached, or has ended.
    """
    node = OtherNode(_meeting(place), terms.secret, _hello(place, terms), say)
    try:
        welcome = node.join()
        where = find.Elsewhere(host=welcome.host, directory=welcome.directory)
        find.note_elsewhere(journal_root, place.cluster, welcome.job_id, where)
        say(f"taking part as {place.node}; node0 is {one_line(welcome.host)}")
        with _own_directory(place) as directory:
            agent_command = command(directory, welcome.run_id)
            agent = OwnAgent(place.node, agent_command, environ(node.own_host))
            try:
                return _followed(node, place, directory, welcome.run_id, agent)
            finally:
                agent.stop(0.0)
    except KeyboardInterrupt as end:
        node.leave(f"Ctrl-C ({signal_behind(end)})", for_all=True)
        raise
    except SystemExit as end:
        node.leave(signal_behind(end), for_all=False)
        raise
    except SlurmHealthError as err:
        node.leave(f"an error: {err}", for_all=False)
        raise
    finally:
        node.close()


def _hello(place: TaskPlace, terms: Terms) -> messages.Hello:
    """Return what this node says first; its connection adds what is each time new."""
    return messages.Hello(
        protocol=messages.PROTOCOL,
        nonce="",
        slurm_health=__version__,
        rank=place.nodes.index(place.node),
        host=socket.gethostname(),
        nnodes=terms.nnodes,
        check=terms.check,
        rdzv_id=terms.rdzv_id,
        token="",
    )


def _followed(
    node: OtherNode, place: TaskPlace, directory: Path, run_id: str, agent: OwnAgent
) -> tuple[JointOutcome, dict[str, str]]:
    journal.create(directory, [place.node])
    to_agent = orders.OrderWriter(directory, run_id, place.nodes)
    node.ship(journal.path_of(directory, place.node))
    heard: list[Entry] = []
    while (outcome := joint_check.outcome_of(heard, directory)) is None:
        news = node.exchange(_LOOK_S, [] if agent.descriptor is None else [agent.descriptor])
        heard += news
        agent.hear()
        if news and to_agent.append(*_trusted(news, place)):
            agent.ring()
        joint_check.serve(agent, directory, (entry.record for entry in news))
    agent.stop()
    return outcome, addresses(heard)


def addresses(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the addresses of nodes, as their agents say them."""
    return {
        entry.record.node: entry.record.address
        for entry in entries
        if isinstance(entry.record, AgentStarted)
    }


def _trusted(news: Sequence[Entry], place: TaskPlace) -> list[Record]:
    """Return the records, none of which may have a file of this machine run.

    Raises:
        ChannelError: one would.
    """
    records = [entry.record for entry in news if entry.record is not None]
    for record in records:
        if isinstance(record, RoundStarted) and any(probe.path for probe in record.probes):
            raise ChannelError(_meeting(place).text, "node0 orders a probe that it may not")
    return records


@contextlib.contextmanager
def _own_directory(place: TaskPlace) -> Iterator[Path]:
    """Provide a directory like that of a run, for as long as the check takes.

    Raises:
        NoRoom: there is no place for temporary files.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="slurm-health-", ignore_cleanup_errors=True)
    except OSError as err:
        raise NoRoom("this node's part of the journal", err.strerror or str(err)) from err
    with temporary as root:
        yield journal.job_directory(Path(root), place.cluster, "run") / journal.label_of(0, 1)


def _meeting(place: TaskPlace) -> NodeZeroAddress:
    assert place.meeting is not None
    return place.meeting


def read_secret(file: str | None, environ: Mapping[str, str]) -> bytes:
    """Return what only the nodes of a run know, by a file or the environment; nothing by neither.

    Raises:
        ConfigError: it cannot be read, others may read it too, or it is too short to be one.
    """
    if file is None:
        text = environ.get(KEY_VARIABLE)
        return b"" if text is None else _checked_secret("environment", KEY_VARIABLE, text.encode())
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            found = opened.read(_MOST_KEY_BYTES)
    except OSError as err:
        raise ConfigError(f"--{KEY_OPTION}", file, f"cannot be read: {err.strerror}") from err
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        problem = f"others may read or change it; fix: chmod 600 {file} (Kubernetes: {_KUBERNETES})"
        raise ConfigError(f"--{KEY_OPTION}", file, problem)
    return _checked_secret(f"--{KEY_OPTION}", file, found)


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that others may have: the secret is not in it."""
    return {name: value for name, value in environ.items() if name != KEY_VARIABLE}


def _checked_secret(source: str, key: str, secret: bytes) -> bytes:
    secret = secret.strip()
    if len(secret) < _LEAST_KEY_BYTES:
        problem = f"a secret needs at least {_LEAST_KEY_BYTES} characters, this has {len(secret)}"
        raise ConfigError(source, key, f"{problem}; {_MAKE_ONE}")
    return secret
