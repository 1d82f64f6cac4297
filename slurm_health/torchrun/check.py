# SPDX-License-Identifier: Apache-2.0
"""The check of the nodes of a training, as each of its processes takes part in it.

It is the ordinary check: its controller runs in the first process, and its agents are children of
the processes, so that they have what the step has: its devices, its container, its environment.
Where nodes share no directory, `channel` mirrors the files of the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health import __version__
from slurm_health.preflight import config
from slurm_health.preflight.chosen_probes import chosen_phases, why_light
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.master import priors
from slurm_health.preflight.master.job_environment import environ_after
from slurm_health.preflight.master.master import Master
from slurm_health.preflight.master.run_check import agent_command, make_localizer, run_started
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records import records
from slurm_health.records.errors import (
    ConfigError,
    ExitCode,
    NoRoom,
    SlurmHealthError,
)
from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import TrainingPlanned
from slurm_health.records.text import one_line
from slurm_health.report import find
from slurm_health.system import journal
from slurm_health.system.signals import signal_behind
from slurm_health.torchrun.arguments import Arguments, Bounds
from slurm_health.torchrun.channel import JOIN_S, End, Hello, NodeZero, OtherNode, Welcome
from slurm_health.torchrun.node_choice import choose
from slurm_health.torchrun.place import TaskPlace, agent_environ
from slurm_health.torchrun.step import (
    READ_SHARE,
    STEP,
    Follower,
    Leader,
    OwnAgent,
    StepAgents,
)

KEY_VARIABLE = "SLURM_HEALTH_SECRET"
# A shorter one could be guessed from a recorded handshake.
_LEAST_KEY_BYTES = 16
LAST_CALL_S = 30.0  # for the next node, once enough are there; torchrun waits as long
_REPORT_S, _POLL_S = 5.0, 0.02
_HEARD_S = 10.0  # for the others to read the outcome, or to sign off


def say(text: str) -> None:
    """Write a line to standard error."""
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)


def checked(
    member: Leader | Follower,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
) -> TrainingPlanned | int:
    """Return the nodes that train, or the code this process ends with because its does not.

    Raises:
        SlurmHealthError: the surroundings or the journal cannot be used.
        Begun: the training has begun without this node.
    """
    place = member.place
    command = agent_command(
        member.directory,
        run_id=place.start,
        nodes=len(place.nodes) * (READ_SHARE if place.meeting is None else 1),
        python=python,
        programs=[],  # the checks of `run` need none, whatever another machine orders
    )
    probe_environ = without_secret(environ_after(arguments.text("setup"), environ))
    own_host = member.channel.own_host if isinstance(member, Follower) and member.channel else ""
    agent_env = agent_environ(place, probe_environ, own_host)
    if isinstance(member, Leader):
        agents = StepAgents(member, command, agent_env)
        start = _lead(member, agents, within, arguments, python, environ)
    else:
        agent = OwnAgent(place.node, command, agent_env)
        try:
            start = member.check(agent)
        finally:
            agent.stop(0.0)
    if start.nodes:
        return start
    if place.leads:
        say(f"training does NOT start: {start.reason}")
    return ExitCode.BAD_NODES


@contextlib.contextmanager
def member_of(
    place: TaskPlace,
    everyone: Sequence[str],
    arguments: Arguments,
    environ: Mapping[str, str],
    *,
    checks: bool,
) -> Iterator[Leader | Follower]:
    """Provide this process's part in a start, which begins with a check or not.

    Nodes of `everyone` that do not begin with it may join. However it ends, the others get a last
    word.

    Raises:
        ChannelError, UsageError: node 0 cannot be reached, or refuses this node.
        JournalError: the journal cannot be read or written.
        NoRoom: there is no place for temporary files.
    """
    root = config.journal_root(arguments.text("journal"), environ)
    key = key_of(arguments, environ)
    if place.meeting is not None and not place.leads:
        with _mirrored(place, root, arguments, key) as follower:
            yield follower
        return
    journal.await_answer(root)
    directory = directory_of(root, place, checks=checks)
    if not place.leads:
        yield Follower(place, directory)
        return
    leader = Leader(place, everyone if place.meeting else place.nodes, directory)
    if place.meeting is not None and KEY_VARIABLE not in environ:
        at = place.meeting.beside.text
        say(f"no secret is set ({KEY_VARIABLE}): any process that reaches {at} may take part")
    with _listening(leader, everyone, arguments, key):
        try:
            yield leader
        except BaseException as err:
            leader.stop(err)
            raise


def directory_of(root: Path, place: TaskPlace, *, checks: bool) -> Path:
    """Return the directory of a start, the same one in all its processes.

    One without a check is none of the job's runs, and has a name that no report reads.

    Raises:
        JournalError: an older journal cannot be read.
    """
    try:
        name = journal.name_of(root, place.cluster, str(place.job_id), os.geteuid(), make=True)
    except OSError as err:
        raise journal.unusable(root, "written", err) from err
    job = journal.job_directory(root, place.cluster, name)
    if not checks:
        return job / f"run.{zlib.crc32(place.start.encode()):08x}"
    return journal.directory_of_start(
        job, attempt=place.attempt, step=place.step, run_id=place.start
    )


# --- the first process --------------------------------------------------------------------------


def _lead(
    leader: Leader,
    agents: StepAgents,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
) -> TrainingPlanned:
    """Run the check for all processes, and decide who trains.

    Raises:
        JournalError: the journal cannot be read or written.
    """
    place, directory = leader.place, leader.directory
    if leader.channel is not None:
        _await_nodes(leader.channel, place, within.least)
    nodes, exclude_slow = list(place.nodes), "exclude_straggler" in arguments.own
    prior = priors.of_site(config.standings(environ), place.cluster, nodes, now_s=time.time())
    started = run_started(
        place,
        {**environ, "SLURMD_NODENAME": place.node},
        run_id=place.start,
        script=arguments.program[0],
        settings={
            "python": python,
            "check": arguments.check,
            "paths": config.storage_paths(JobSpec(), environ),
            "nnodes": within.text,
            "exclude_straggler": exclude_slow,
            **{name: value for name, value in arguments.own.items() if name == "setup"},
        },
    )
    started = msgspec.structs.replace(started, prior=prior)
    if place.array:
        journal.link_array_task(directory.parents[2], started)
    controller = Controller(
        nodes,
        functools.partial(make_localizer, prior=prior),
        TimeLimits(),
        chosen_phases(arguments.check),
        config.expectations(environ),
        config.localize(environ),
        why_light(arguments.check),
    )
    journal.create(directory, [journal.MASTER])
    master = Master(directory, controller, agents, alive=leader.show_life)
    with master.led(started) as verdict:
        agents.stop()
        known = [
            entry.record
            for node in nodes
            for entry in journal.read_all(directory, node)
            if isinstance(entry.record, records.AgentStarted)
        ]
        absent = set(nodes).difference(record.node for record in known)
        planned = choose(within, verdict, absent=absent, exclude_slow=exclude_slow)
        planned = msgspec.structs.replace(
            planned, addresses={record.node: record.address for record in known}
        )
        go, reason = bool(planned.nodes), planned.reason
        outcome = records.JobOutcome(
            disposition=records.Disposition.PROCEED if go else records.Disposition.STOP,
            exit_code=ExitCode.HEALTHY if go else ExitCode.BAD_NODES,
            reason=reason,
        )
        proceed = records.Action.PROCEED
        intended = records.ActionIntended(action=proceed, nodes=planned.nodes, reason=reason)
        master.append(*([intended] if go else []), outcome)
        leader.step.append(planned)
    from slurm_health.report import read, text
    from slurm_health.report.build import run_of
    from slurm_health.report.layout import Page

    run = run_of(read.read_run(directory))
    say(text.check_text(run, Page()) if reason else text.headline(run))
    return planned


def _await_nodes(channel: NodeZero, place: TaskPlace, least: int) -> None:
    """Wait for all nodes; once there are enough, not long after the last one that came."""
    begun_s = came_s = time.monotonic()
    missing, reported = list(place.nodes[1:]), False
    while missing:
        channel.raise_interrupt()
        before, now_s = missing, time.monotonic()
        missing = [node for node in place.nodes[1:] if not channel.peers[node].token]
        came_s = came_s if missing == before else now_s
        enough = len(place.nodes) - len(missing) >= least
        if now_s - begun_s > JOIN_S or (enough and now_s - came_s > LAST_CALL_S):
            say(f"beginning without {fold(missing)}: nothing has connected to {channel.at}")
            return
        if missing and not reported and now_s - begun_s > _REPORT_S:
            reported = True
            say(f"waiting for {fold(missing)} at {channel.at}")
        time.sleep(_POLL_S)
    say(f"all nodes are there; the journal is here: slurm-health report {place.job_id}")


# --- nodes that share no directory --------------------------------------------------------------


@contextlib.contextmanager
def _listening(
    leader: Leader, everyone: Sequence[str], arguments: Arguments, key: bytes
) -> Iterator[None]:
    """While active, the first process has a channel to nodes that share no directory.

    Raises:
        ChannelError: the port is taken, or may not be opened.
    """
    place = leader.place
    if place.meeting is None:
        yield
        return
    welcome = Welcome(
        run_id=place.start,
        job_id=place.job_id,
        directory=str(leader.directory),
        host=socket.gethostname(),
    )
    others = [node for node in everyone if node != place.node]
    channel = NodeZero(place.meeting.beside, key, welcome, _terms(arguments), others, say)
    leader.channel = channel
    try:
        yield
    finally:
        give_up_s = time.monotonic() + _HEARD_S
        while channel.connected and time.monotonic() < give_up_s:
            time.sleep(_POLL_S)
        channel.close(End(why=f"{place.node} has ended"))


@contextlib.contextmanager
def _mirrored(place: TaskPlace, root: Path, arguments: Arguments, key: bytes) -> Iterator[Follower]:
    """Provide this process's part in a start that node 0 leads, in a directory that lasts as long.

    Raises:
        ChannelError: node 0 cannot be reached, or has ended.
        JournalError: node 0 cannot use its journal.
        NoRoom: there is no place for temporary files.
        UsageError: node 0 refuses this node.
    """
    assert place.meeting is not None
    hello = Hello(
        token=secrets.token_hex(16),
        node=place.node,
        host=socket.gethostname(),
        terms=_terms(arguments),
    )
    try:
        temporary = tempfile.TemporaryDirectory(prefix="slurm-health-", ignore_cleanup_errors=True)
    except OSError as err:
        raise NoRoom("this node's part of the journal", err.strerror or str(err)) from err
    with temporary as name:
        directory = journal.job_directory(Path(name), place.cluster, "run") / "0"
        journal.create(directory, [STEP, place.node])
        file = journal.path_of(directory, place.node)
        channel = OtherNode(place.meeting.beside, key, hello, file, say)
        last_word = End()
        try:
            welcome = channel.join()
            where = find.Elsewhere(host=welcome.host, directory=welcome.directory)
            find.note_elsewhere(root, place.cluster, welcome.job_id, where)
            say(f"taking part as {place.node}; node0 is {one_line(welcome.host)}")
            yield Follower(replace(place, start=welcome.run_id), directory, channel)
        except (KeyboardInterrupt, SystemExit) as end:
            last_word = End(why=signal_behind(end), for_all=isinstance(end, KeyboardInterrupt))
            raise
        except SlurmHealthError as err:
            last_word = End(why=f"an error: {err}")
            raise
        finally:
            channel.close(last_word)


def _terms(arguments: Arguments) -> str:
    """Return what must be the same on all nodes."""
    given = arguments.given
    run = f"--nnodes={given['nnodes']}, --rdzv-id={given.get('rdzv_id', 'none')}"
    check = arguments.check if arguments.checks else "nothing"
    return f"slurm-health {__version__}, {run}, to check {check}"


def key_of(arguments: Arguments, environ: Mapping[str, str]) -> bytes:
    """Return the secret of a run's nodes; if none is set, a weak one that they have in common.

    Raises:
        ConfigError: it is too short to be one.
    """
    if KEY_VARIABLE not in environ:
        return f"slurm-health run {arguments.given.get('rdzv_id', '')}".encode()
    secret = environ[KEY_VARIABLE].strip().encode()
    if len(secret) < _LEAST_KEY_BYTES:
        problem = f"a secret needs at least {_LEAST_KEY_BYTES} characters, this has {len(secret)}"
        raise ConfigError(
            "environment", KEY_VARIABLE, f"{problem}; make one with: openssl rand -hex 32"
        )
    return secret


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that others may have: the secret is not in it."""
    return {name: value for name, value in environ.items() if name != KEY_VARIABLE}
