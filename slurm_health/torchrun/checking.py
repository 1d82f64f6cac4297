# SPDX-License-Identifier: Apache-2.0
"""A check of the nodes of a training, as each of its processes takes part in it."""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health import __version__
from slurm_health.preflight import config
from slurm_health.preflight.chosen_probes import chosen_phases, why_light
from slurm_health.preflight.master import priors
from slurm_health.preflight.master.job_environment import environ_after
from slurm_health.preflight.master.launcher import AgentCommand, Launcher
from slurm_health.preflight.master.master import MasterSettings
from slurm_health.preflight.master.run_check import agent_command, make_localizer
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.errors import ExitCode, JournalError
from slurm_health.records.records import RunStarted
from slurm_health.records.text import duration_text
from slurm_health.system import journal
from slurm_health.torchrun import earlier_check, joint_check, unshared_check
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.channel.other_node import NobodyThere
from slurm_health.torchrun.earlier_check import EarlierCheck
from slurm_health.torchrun.joint_check import JointOutcome, OwnAgent
from slurm_health.torchrun.node_choice import Bounds, others_text, why_left_out
from slurm_health.torchrun.place import TaskPlace, single
from slurm_health.torchrun.starting import Starting, addresses_in, agent_environ, all_of
from slurm_health.torchrun.unshared_check import Terms

# What is wrong with a directory itself is the same on all nodes that share it, and one says it.
_SAME_EVERYWHERE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def checked(
    place: TaskPlace,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
) -> Starting | int:
    """Return the nodes that train, or the code this process ends with because its does not.

    Where nodes share no directory, the place of the first one has a name for this check.

    Raises:
        SlurmHealthError: the surroundings or the journal cannot be used.
    """
    root = config.journal_root(arguments.text("journal"), environ)
    if place.meeting is not None and not place.leads:
        return _taken_part(place, root, within, arguments, python, environ)
    try:
        journal.await_answer(root)
        directory = joint_check.directory_of(root, place)
        started = _started(place, arguments, within.text, python)
        if place.leads and place.array:
            journal.link_array_task(root, started)
        outcome = _check(directory, place, started, within, arguments, environ)
    except JournalError as err:
        if within.least < len(place.nodes):
            raise  # the others may go on without this node
        if _is_to_tell(err, place):
            say(f"{place.node}: UNCHECKED: {err}; starting the training anyway")
        return all_of(place)
    chosen = outcome.choice.nodes
    if place.node not in chosen:
        return _stay_out(place, outcome, within)
    addresses = addresses_in(directory, place.nodes, chosen)
    return Starting(nodes=chosen, addresses=addresses, directory=directory)


def _check(
    directory: Path,
    place: TaskPlace,
    started: RunStarted,
    within: Bounds,
    arguments: Arguments,
    environ: Mapping[str, str],
) -> JointOutcome:
    python = str(started.settings["python"])
    looked_for = len(place.nodes) * (1 if place.meeting else joint_check.AGENTS_SHARE)
    command = agent_command(directory, run_id=place.start, nodes=looked_for, python=python)
    probe_environ = environ_after(arguments.text("setup"), environ)
    agent = OwnAgent(place.node, command, agent_environ(place, probe_environ))
    if not place.leads:
        try:
            return joint_check.follow(directory, place, agent)
        finally:
            agent.stop(0.0)
    exclude_slow = arguments.exclude_straggler
    earlier = _earlier(directory, place, arguments)
    if earlier is not None:
        outcome = joint_check.adopt(directory, started, earlier, within, exclude_slow=exclude_slow)
        _say_adopted(earlier, outcome)
        return outcome
    known = priors.of_site(
        config.standings(environ), started.cluster, started.nodes, now_s=time.time()
    )
    settings = _settings(arguments, environ, known)
    started = msgspec.structs.replace(started, prior=known)
    with _launcher(place, directory, within, agent, arguments, environ) as launcher:
        outcome = joint_check.lead(
            directory, started, launcher, within, settings, exclude_slow=exclude_slow
        )
    _summarize(directory, outcome)
    return outcome


def _earlier(directory: Path, place: TaskPlace, arguments: Arguments) -> EarlierCheck | None:
    """Return the check that need not be repeated; None if there is none."""
    phases = chosen_phases(arguments.check)
    probes = {probe.name for phase in phases for probe in phase.probes}
    return earlier_check.find(directory, place, probes)


def _settings(
    arguments: Arguments, environ: Mapping[str, str], prior: dict[str, float]
) -> MasterSettings:
    return MasterSettings(
        limits=TimeLimits(),
        phases=chosen_phases(arguments.check),
        make_localizer=functools.partial(make_localizer, prior=prior),
        expectations=config.expectations(environ),
        localize=config.localize(environ),
        light=why_light(arguments.check),
    )


def _launcher(
    place: TaskPlace,
    directory: Path,
    within: Bounds,
    agent: OwnAgent,
    arguments: Arguments,
    environ: Mapping[str, str],
) -> contextlib.AbstractContextManager[Launcher]:
    """Return what starts the agents: the others' read the journal too, or are told of it."""
    if place.meeting is None:
        return contextlib.nullcontext(agent)
    terms = _terms(arguments, environ)
    return unshared_check.led(place, directory, terms, within.least, agent, say)


def _terms(arguments: Arguments, environ: Mapping[str, str]) -> Terms:
    return Terms(
        nnodes=arguments.given["nnodes"],
        check=arguments.check,
        rdzv_id=arguments.given.get("rdzv_id", ""),
        secret=unshared_check.read_secret(arguments.text(unshared_check.KEY_OPTION), environ),
    )


def _taken_part(
    place: TaskPlace,
    root: Path,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
) -> Starting | int:
    """Take part in a check that node 0 leads, and end as `_checked` does."""
    terms = _terms(arguments, environ)
    probe_environ = environ_after(arguments.text("setup"), environ)

    def command(directory: Path, run_id: str) -> AgentCommand:
        return agent_command(directory, run_id=run_id, nodes=len(place.nodes), python=python)

    def agents(host: str) -> Mapping[str, str]:
        return {**unshared_check.without_secret(probe_environ), "SLURM_LAUNCH_NODE_IPADDR": host}

    try:
        outcome, addresses = unshared_check.take_part(place, terms, command, agents, root, say)
    except (JournalError, NobodyThere) as err:
        if within.least == len(place.nodes):
            say(f"{place.node}: UNCHECKED: {err}; starting the training anyway")
            return all_of(place)
        if isinstance(err, NobodyThere):
            return _joining(place, arguments, python, environ)
        raise
    if place.node not in outcome.choice.nodes:
        return _stay_out(place, outcome, within)
    return Starting(nodes=outcome.choice.nodes, addresses=addresses)


def _joining(
    place: TaskPlace, arguments: Arguments, python: str, environ: Mapping[str, str]
) -> Starting | int:
    """Check this node by itself: the others train already, and let it in if it may join them."""
    say(f"{place.node}: the training has begun; checking this node alone before it joins")
    here = single(environ, host=socket.gethostname(), now_s=int(time.time()))
    here = replace(here, nodes=(place.node,), node=place.node)
    found = checked(here, Bounds(least=1, most=1, joins=True), arguments, python, environ)
    return found if isinstance(found, int) else all_of(place)


def _started(place: TaskPlace, arguments: Arguments, nnodes: str, python: str) -> RunStarted:
    return RunStarted(
        run_id=place.start,
        job_id=place.job_id,
        attempt=place.attempt,
        cluster=place.cluster,
        partition=place.partition,
        nodes=list(place.nodes),
        master_node=place.nodes[0],
        user=getpass.getuser(),
        script=arguments.program[0],
        array=place.array,
        start_time_s=place.start_time_s,
        slurm_health=__version__,
        settings={
            "python": python,
            "check": arguments.check,
            **({"setup": str(arguments.own["setup"])} if "setup" in arguments.own else {}),
            "nnodes": nnodes,
            "exclude_straggler": arguments.exclude_straggler,
        },
    )


def _summarize(directory: Path, outcome: JointOutcome) -> None:
    from slurm_health.report import read, text
    from slurm_health.report.build import run_of
    from slurm_health.report.layout import Page

    run = run_of(read.read_run(directory))
    say(text.check_text(run, Page()) if outcome.choice.reason else text.headline(run))


def _is_to_tell(err: JournalError, place: TaskPlace) -> bool:
    """Tell whether this process is the one of the step that says why nothing was checked."""
    if isinstance(err, joint_check.Unheard):
        return place.node == place.nodes[1]  # the first one cannot
    shared = isinstance(err.__cause__, OSError) and err.__cause__.errno in _SAME_EVERYWHERE
    return place.leads or not shared


def _say_adopted(earlier: EarlierCheck, outcome: JointOutcome) -> None:
    from slurm_health.report import read
    from slurm_health.report.build import run_of
    from slurm_health.report.sentences import levels_text

    found = levels_text(run_of(read.read_run(earlier.directory)))
    ago = duration_text(max(0.0, time.time() - earlier.ended_s))
    why = f"; {outcome.choice.reason}" if outcome.choice.nodes and outcome.choice.reason else ""
    say(f"the job's nodes were checked {ago} ago: {found}{why}")


def _stay_out(place: TaskPlace, outcome: JointOutcome, within: Bounds) -> int:
    if not outcome.choice.nodes:
        if place.leads:
            does_not = "the training is NOT joined" if within.joins else "training does NOT start"
            say(f"{does_not}: {outcome.choice.reason}")
        return ExitCode.BAD_NODES
    say(
        f"{place.node} is LEFT OUT: {why_left_out(outcome.verdict, place.node)};"
        f" training goes on with {others_text(len(outcome.choice.nodes))}"
    )
    return ExitCode.HEALTHY


def say(text: str) -> None:
    """Say something on standard error."""
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)
