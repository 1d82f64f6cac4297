# SPDX-License-Identifier: Apache-2.0
"""The check of the nodes of a training, as each of its processes takes part in it.

It is the ordinary check: its controller runs in the first process, and its agents are children of
the processes, so that they have what the step has: its devices, its container, its environment.
Where nodes share no directory, `channel` mirrors the files of the run.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health import __version__
from slurm_health.preflight import config
from slurm_health.preflight.chosen_probes import chosen_phases, why_light
from slurm_health.preflight.master import priors
from slurm_health.preflight.master.job_environment import environ_after
from slurm_health.preflight.master.launcher import AgentCommand
from slurm_health.preflight.master.master import (
    HEARTBEAT_S,
    Master,
    MasterSettings,
    poll_interval_s,
)
from slurm_health.preflight.master.run_check import agent_command, make_localizer, run_started
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records import records
from slurm_health.records.errors import (
    ConfigError,
    ExitCode,
    JournalError,
    NoRoom,
    SlurmHealthError,
)
from slurm_health.records.nodeset import fold
from slurm_health.records.text import duration_text, one_line
from slurm_health.report import find
from slurm_health.system import journal
from slurm_health.system.signals import signal_behind
from slurm_health.torchrun import earlier_check
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.channel import (
    CUT_S,
    JOIN_S,
    End,
    Hello,
    NobodyThere,
    NodeZero,
    OtherNode,
    Welcome,
)
from slurm_health.torchrun.earlier_check import EarlierCheck
from slurm_health.torchrun.node_choice import Bounds, NodeChoice, choose, others_text
from slurm_health.torchrun.place import TaskPlace, agent_environ, single
from slurm_health.torchrun.step import (
    READ_SHARE,
    STEP,
    OwnAgent,
    Start,
    Unheard,
    directory_of,
    follow,
    start_of,
    used_before,
)

KEY_VARIABLE = "SLURM_HEALTH_SECRET"
KEY_OPTION = "secret-file"
# A shorter one could be guessed from a recorded handshake.
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 16, 65536
LAST_CALL_S = 30.0  # for the next node, once enough are there; torchrun waits as long
_REPORT_S, _POLL_S = 5.0, 0.02
_HEARD_S = 10.0  # for the others to read the outcome, or to sign off
# Of a filesystem that one node does not reach. Other errors are the same on all nodes that share
# it, and one of them reports it.
_OF_ONE_NODE = {None, errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT}


def checked(
    place: TaskPlace,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
) -> Start | int:
    """Return the nodes that train, or the code this process ends with because its does not.

    Where nodes share no directory, the place of the first one has a name for this check.

    Raises:
        SlurmHealthError: the surroundings or the journal cannot be used.
    """
    root = config.journal_root(arguments.text("journal"), environ)
    probe_environ = without_secret(environ_after(arguments.text("setup"), environ))
    try:
        if place.meeting is not None and not place.leads:
            start = _follow_over_channel(place, root, arguments, python, environ, probe_environ)
        else:
            journal.await_answer(root)
            directory = directory_of(root, place)
            agent_env = agent_environ(place, probe_environ)
            if place.leads:
                start = _lead(place, directory, within, arguments, python, environ, agent_env)
            else:
                count = READ_SHARE * len(place.nodes)
                command = agent_command(directory, run_id=place.start, nodes=count, python=python)
                with OwnAgent(place.node, command, agent_env) as agent:
                    start = follow(directory, place, agent)
    except (JournalError, NobodyThere) as err:
        if within.least == len(place.nodes):
            if _is_to_report(err, place):
                say(f"{place.node}: UNCHECKED: {err}; starting the training anyway")
            return Start(nodes=place.nodes)
        if isinstance(err, JournalError):
            raise  # the others may go on without this node
        say(f"{place.node}: the training has begun; checking this node alone before it joins")
        here = single(environ, host=socket.gethostname(), now_s=int(time.time()))
        here = replace(here, nodes=(place.node,), node=place.node)
        alone = Bounds(least=1, most=1, joins=True)
        joining = checked(here, alone, arguments, python, environ)
        return joining if isinstance(joining, int) else Start(nodes=place.nodes)
    if place.node in start.nodes:
        return start
    if start.nodes:
        say(
            f"{place.node} is LEFT OUT: {start.left_out[place.node]};"
            f" training goes on with {others_text(len(start.nodes))}"
        )
        return ExitCode.HEALTHY
    if place.leads:
        does_not = "the training is NOT joined" if within.joins else "training does NOT start"
        say(f"{does_not}: {start.reason}")
    return ExitCode.BAD_NODES


def _is_to_report(err: Exception, place: TaskPlace) -> bool:
    """Tell whether this process is the one of the step that reports why nothing was checked."""
    if isinstance(err, Unheard):
        return place.node == place.nodes[1]  # the first one cannot
    of_one = getattr(err.__cause__, "errno", None) in _OF_ONE_NODE
    return place.leads or place.meeting is not None or of_one


def say(text: str) -> None:
    """Write a line to standard error."""
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)


# --- the first process --------------------------------------------------------------------------


class StepAgents(OwnAgent):
    """The first process's launcher: the others read in the step's file when to start their agents.

    Args:
        own: node, command and environment of the agent here.
        step: the step's file.
        channel: to nodes that share no directory.
    """

    def __init__(
        self,
        own: tuple[str, AgentCommand, Mapping[str, str]],
        step: journal.Writer,
        channel: NodeZero | None,
    ) -> None:
        super().__init__(*own)
        self._step, self._channel = step, channel
        self._launches: dict[str, int] = {}
        self._alive_s = time.monotonic()

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent here, and have the others started."""
        self._step.append(records.AgentsLaunched(launch=launch, nodes=list(nodes)))
        self._launches |= dict.fromkeys(nodes, launch)
        super().start(launch, nodes)

    def poll(self) -> list[records.AgentsLost]:
        """Return the end of the agent here, and nodes that the channel does not reach."""
        lost = super().poll()
        if self._channel is not None:
            self._channel.raise_interrupt()
        for node, peer in self._channel.peers.items() if self._channel is not None else ():
            if peer.link is not None or node not in self._launches:
                continue
            if not peer.token:
                reason = "it has not connected to node0"
            elif peer.end is not None:
                reason = f"its process was ended by {peer.end.why}"
            elif time.monotonic() - peer.lost_s > CUT_S:
                reason = (
                    f"it could not be reached: the connection from {peer.host} broke off and did"
                    f" not come back within {CUT_S:g} s"
                )
            else:
                continue
            # The node may be well: this is no evidence against it.
            cause = records.LossCause.NO_JOURNAL
            launch = self._launches.pop(node)
            lost.append(records.AgentsLost(launch=launch, nodes=[node], reason=reason, cause=cause))
        return lost

    def keep_alive(self) -> None:
        """Write now and then that the check goes on."""
        if time.monotonic() - self._alive_s > HEARTBEAT_S:
            self._alive_s = time.monotonic()
            self._step.append(records.MasterWaits(reason=""))


def _lead(
    place: TaskPlace,
    directory: Path,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
    agent_env: Mapping[str, str],
) -> Start:
    """Run the check for all processes, or adopt an earlier one, and decide who trains.

    Raises:
        ChannelError: the nodes share no directory, and the port is taken.
        JournalError: the journal cannot be read or written, or another start of the same name
            has been there.
    """
    if journal.read_all(directory, journal.MASTER):
        raise used_before(directory)
    phases = chosen_phases(arguments.check)
    probes = {probe.name for phase in phases for probe in phase.probes}
    earlier = earlier_check.find(directory, place, probes)
    nodes = list(place.nodes)
    site = config.standings(environ)
    prior = priors.of_site(site, place.cluster, nodes, now_s=time.time())
    recorded: dict[str, str | int | float | bool] = {
        "python": python,
        "check": arguments.check,
        "nnodes": within.text,
        "exclude_straggler": arguments.exclude_straggler,
    }
    if "setup" in arguments.own:
        recorded["setup"] = arguments.own["setup"]
    if earlier is not None:
        recorded[earlier_check.ADOPTED] = earlier.directory.name
    started = run_started(
        place,
        {**environ, "SLURMD_NODENAME": place.node},
        run_id=place.start,
        script=arguments.program[0],
        settings=recorded,
    )
    started = msgspec.structs.replace(started, prior=prior)
    if place.array:
        journal.link_array_task(directory.parents[2], started)
    journal.create(directory, [journal.MASTER, STEP, *nodes])
    step = journal.Writer(directory, STEP, time.time)
    choose_from = functools.partial(choose, within, exclude_slow=arguments.exclude_straggler)
    if earlier is not None:
        here = [verdict for verdict in earlier.verdict.nodes if verdict.node in nodes]
        verdict = records.VerdictReached(nodes=here)
        choice = choose_from(verdict, absent=())
        journal.Writer(directory, journal.MASTER, time.time).append(started, *_outcome(choice))
        start = _decided(directory, step, verdict, choice)
        _report_verdict(directory, start, earlier)
        return start
    looked_for = len(nodes) * (1 if place.meeting else READ_SHARE)
    command = agent_command(directory, run_id=place.start, nodes=looked_for, python=python)
    with _channel(place, directory, within, arguments, environ) as channel:
        agents = StepAgents((place.node, command, agent_env), step, channel)
        settings = MasterSettings(
            limits=TimeLimits(),
            phases=phases,
            make_localizer=functools.partial(make_localizer, prior=prior),
            expectations=config.expectations(environ),
            localize=config.localize(environ),
            light=why_light(arguments.check),
            alive=agents.keep_alive,
        )
        try:
            master = Master(directory, nodes, agents, settings)
            with master.led(started) as verdict:
                agents.stop()
                choice = choose_from(verdict, absent=_absent(directory, nodes[1:]))
                master.append(*_outcome(choice))
                start = _decided(directory, step, verdict, choice)
        except (KeyboardInterrupt, SystemExit) as end:
            with contextlib.suppress(JournalError):
                step.append(records.MasterStopped(reason=signal_behind(end)))
            raise
    _report_verdict(directory, start, None)
    return start


@contextlib.contextmanager
def _channel(
    place: TaskPlace,
    directory: Path,
    within: Bounds,
    arguments: Arguments,
    environ: Mapping[str, str],
) -> Iterator[NodeZero | None]:
    """Provide the channel to the other nodes, once they are there; None if they share a directory.

    However this ends, the others get a last word.

    Raises:
        ChannelError: the port is taken, or may not be opened.
    """
    if place.meeting is None:
        yield None
        return
    at = place.meeting.text
    secret = read_secret(arguments.text(KEY_OPTION), environ)
    if not secret:
        say(f"no secret is set ({KEY_VARIABLE}): any process that reaches {at} may take part")
    welcome = Welcome(
        run_id=place.start,
        job_id=place.job_id,
        directory=str(directory),
        host=socket.gethostname(),
    )
    key = secret or _weak_key(arguments)
    channel = NodeZero(place.meeting, key, welcome, _terms(arguments), place.nodes, say)
    try:
        _await_nodes(channel, place, within.least, at)
        yield channel
        give_up_s = time.monotonic() + _HEARD_S
        while time.monotonic() < give_up_s and any(
            peer.link is not None for peer in channel.peers.values()
        ):
            time.sleep(_POLL_S)
    except JournalError as err:
        channel.close(End(why=str(err), unchecked=True))
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        channel.close(End(why=f"{place.node} was ended by {signal_behind(end)}"))
        raise
    except BaseException as err:
        channel.close(End(why=f"{place.node}: {err}"))
        raise
    finally:
        channel.close()


def _await_nodes(channel: NodeZero, place: TaskPlace, least: int, at: str) -> None:
    """Wait for all nodes; once there are enough, not long after the last one that came."""
    begun_s = came_s = time.monotonic()
    missing, reported = list(place.nodes[1:]), False
    while missing:
        channel.raise_interrupt()
        before, now_s = missing, time.monotonic()
        missing = [node for node, peer in channel.peers.items() if not peer.token]
        came_s = came_s if missing == before else now_s
        enough = len(place.nodes) - len(missing) >= least
        if now_s - begun_s > JOIN_S or (enough and now_s - came_s > LAST_CALL_S):
            say(f"beginning without {fold(missing)}: nothing has connected to {at}")
            return
        if missing and not reported and now_s - begun_s > _REPORT_S:
            reported = True
            say(f"waiting for {fold(missing)} at {at}")
        time.sleep(_POLL_S)
    say(f"all nodes are there; the journal is here: slurm-health report {place.job_id}")


def _absent(directory: Path, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose processes do not sign off: their last record is no agent's end."""
    give_up_s = time.monotonic() + _HEARD_S
    readers = {node: journal.Reader(directory, node) for node in nodes}
    last: dict[str, records.Record | None] = {}
    while readers:
        for entry in journal.read_new_of(directory, list(readers.values())):
            last[entry.id.rpartition(":")[0]] = entry.record
        readers = {
            node: reader
            for node, reader in readers.items()
            if not isinstance(last.get(node), records.AgentEnded)
        }
        if time.monotonic() > give_up_s:
            break
        time.sleep(poll_interval_s(len(nodes)) if readers else 0.0)
    return list(readers)


def _outcome(choice: NodeChoice) -> list[records.Record]:
    """Return the records of how the check ends."""
    go, reason = bool(choice.nodes), choice.reason
    outcome = records.JobOutcome(
        disposition=records.Disposition.PROCEED if go else records.Disposition.STOP,
        exit_code=ExitCode.HEALTHY if go else ExitCode.BAD_NODES,
        reason=reason,
    )
    if not go:
        return [outcome]
    proceed, nodes = records.Action.PROCEED, list(choice.nodes)
    return [records.ActionIntended(action=proceed, nodes=nodes, reason=reason), outcome]


def _decided(
    directory: Path, step: journal.Writer, verdict: records.VerdictReached, choice: NodeChoice
) -> Start:
    """Write for all processes who trains, and return it."""
    left = [judged for judged in verdict.nodes if judged.node not in choice.nodes]
    known = [
        entry.record
        for node in (*choice.nodes[:1], *(judged.node for judged in left))
        for entry in journal.read_all(directory, node)
        if isinstance(entry.record, records.AgentStarted)
    ]
    written = [*known, records.VerdictReached(nodes=left), *_outcome(choice)]
    step.append(*written)
    start = start_of(written, directory)
    assert start is not None
    return start


def _report_verdict(directory: Path, start: Start, earlier: EarlierCheck | None) -> None:
    from slurm_health.report import read, text
    from slurm_health.report.build import run_of
    from slurm_health.report.layout import Page
    from slurm_health.report.sentences import levels_text

    if earlier is None:
        run = run_of(read.read_run(directory))
        say(text.check_text(run, Page()) if start.reason else text.headline(run))
        return
    levels = levels_text(run_of(read.read_run(earlier.directory)))
    ago = duration_text(max(0.0, time.time() - earlier.ended_s))
    why = f"; {start.reason}" if start.nodes and start.reason else ""
    say(f"the job's nodes were checked {ago} ago: {levels}{why}")


# --- nodes that share no directory --------------------------------------------------------------


def _follow_over_channel(
    place: TaskPlace,
    root: Path,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
    probe_environ: Mapping[str, str],
) -> Start:
    """Take part in the check that node 0 leads, in a directory that lasts as long as it.

    Raises:
        ChannelError: node 0 cannot be reached, or has ended.
        JournalError: node 0 cannot use its journal.
        NoRoom: there is no place for temporary files.
        UsageError: node 0 refuses this node.
    """
    assert place.meeting is not None
    secret = read_secret(arguments.text(KEY_OPTION), environ) or _weak_key(arguments)
    hello = Hello(
        token=secrets.token_hex(16),
        rank=place.nodes.index(place.node),
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
        channel = OtherNode(place.meeting, secret, hello, file, say)
        last_word = End()
        try:
            welcome = channel.join()
            where = find.Elsewhere(host=welcome.host, directory=welcome.directory)
            find.note_elsewhere(root, place.cluster, welcome.job_id, where)
            say(f"taking part as {place.node}; node0 is {one_line(welcome.host)}")
            chosen = chosen_phases(arguments.check)
            command = agent_command(
                directory,
                run_id=welcome.run_id,
                nodes=len(place.nodes),
                python=python,
                programs=[each.path for phase in chosen for each in phase.probes if each.path],
            )
            agent_env = {**probe_environ, "SLURM_LAUNCH_NODE_IPADDR": channel.own_host}
            with OwnAgent(place.node, command, agent_env) as agent:
                return follow(directory, place, agent, channel.raise_failure)
        except KeyboardInterrupt as end:
            last_word = End(why=f"Ctrl-C ({signal_behind(end)})", for_all=True)
            raise
        except SystemExit as end:
            last_word = End(why=signal_behind(end))
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
    return f"slurm-health {__version__}, {run}, to check {arguments.check}"


def _weak_key(arguments: Arguments) -> bytes:
    """Return a key for nodes without a secret, from what they have in common."""
    return f"slurm-health run {arguments.given.get('rdzv_id', '')}".encode()


def read_secret(file: str | None, environ: Mapping[str, str]) -> bytes:
    """Return what only the nodes of a run know, by a file or the environment; nothing by neither.

    Raises:
        ConfigError: it cannot be read, others may read it too, or it is too short to be one.
    """
    if file is None and KEY_VARIABLE not in environ:
        return b""
    if file is None:
        source, key, secret = "environment", KEY_VARIABLE, environ[KEY_VARIABLE].encode()
    else:
        source, key = f"--{KEY_OPTION}", file
        try:
            with Path(file).open("rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                secret = opened.read(_MOST_KEY_BYTES)
        except OSError as err:
            raise ConfigError(source, file, f"cannot be read: {err.strerror}") from err
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            remedy = f"chmod 600 {file} (Kubernetes: defaultMode: 0400 of the secret's volume)"
            raise ConfigError(source, file, f"others may read or change it; fix: {remedy}")
    secret = secret.strip()
    if len(secret) < _LEAST_KEY_BYTES:
        problem = f"a secret needs at least {_LEAST_KEY_BYTES} characters, this has {len(secret)}"
        raise ConfigError(source, key, f"{problem}; make one with: openssl rand -hex 32")
    return secret


def without_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that others may have: the secret is not in it."""
    return {name: value for name, value in environ.items() if name != KEY_VARIABLE}
