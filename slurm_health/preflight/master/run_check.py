# SPDX-License-Identifier: Apache-2.0
"""One check from end to end: where it runs, its journal, its master, and what follows."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health import __version__
from slurm_health.preflight import config
from slurm_health.preflight.agent.node_facts import share_devices, visible_devices
from slurm_health.preflight.expectations import Expectation
from slurm_health.preflight.localize.settings import USUAL, DeviceKind, LocalizeSettings
from slurm_health.preflight.master import priors
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.launcher import (
    LEAVE_S,
    AgentCommand,
    Launcher,
    LocalLauncher,
    SlurmLauncher,
)
from slurm_health.preflight.master.master import SILENCE_S, Master, poll_interval_s
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.course import RoundPlanner
from slurm_health.records.allocation import Allocation
from slurm_health.records.errors import JournalError
from slurm_health.records.records import (
    Action,
    ActionDone,
    JobOutcome,
    RunStarted,
    VerdictReached,
)
from slurm_health.system import journal
from slurm_health.system.processes import own_command

if TYPE_CHECKING:
    from slurm_health.system.slurm.client import Client

LOCAL_CLUSTER = "local"
_GRES_S = 20.0


@dataclass(frozen=True, kw_only=True)
class FinishedCheck:
    """How a check ended, and where its journal lies."""

    directory: Path
    verdict: VerdictReached
    finished: JobOutcome


def check_allocation(
    allocation: Allocation, settings: CheckSettings, environ: Mapping[str, str]
) -> FinishedCheck:
    """Check the nodes of the job this process runs in, and act on the verdict if told to.

    Raises:
        SlurmError: Slurm's commands are missing.
        JournalError: the journal cannot be used.
    """
    root = settings.journal_root
    wanted = run_started(
        allocation,
        environ,
        run_id=_run_id(settings),
        script=settings.spec.script,
        submit_time_s=settings.spec.submit_time_s,
        settings=settings.recorded(),
    )
    wanted = msgspec.structs.replace(wanted, prior=_prior(root, wanted, environ))
    directory, started = journal.directory_of_check(root, wanted)
    if started.array:
        journal.link_array_task(root, started)
    if allocation.attempt:  # Slurm has emptied the output of the attempts before
        left = _nodes_left(directory.parent, allocation.attempt)
        moved = f"moved away from {', '.join(left)}" if left else "requeued"
        sys.stderr.write(f"slurm-health: attempt {allocation.attempt + 1}: {moved}\n")
    launcher = SlurmLauncher(
        allocation.job_id,
        _agent_command(directory, started, settings),
        settings.probe_environ,
        # Asked for less long than agents wait for a silent master.
        lambda: _client(environ, patience_s=_GRES_S).gres(started.slurm_name),
    )
    return _check(directory, started, settings, launcher, config.expectations(environ), environ)


def run_started(
    allocation: Allocation,
    environ: Mapping[str, str],
    *,
    run_id: str,
    script: str,
    settings: dict[str, str | int | float | bool],
    submit_time_s: int | None = None,
) -> RunStarted:
    """Return the first record of a check in a job."""
    return RunStarted(
        run_id=run_id,
        job_id=allocation.job_id,
        attempt=allocation.attempt,
        cluster=allocation.cluster,
        partition=allocation.partition,
        nodes=list(allocation.nodes),
        master_node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        user=getpass.getuser(),
        script=script,
        job_name=environ.get("SLURM_JOB_NAME", ""),
        array=allocation.array,
        start_time_s=allocation.start_time_s,
        submit_time_s=submit_time_s,
        slurm_health=__version__,
        settings=settings,
    )


def _nodes_left(job: Path, attempt: int) -> list[str]:
    """Return the nodes that a job has left in earlier attempts, by its journals."""
    left: dict[str, None] = {}
    with contextlib.suppress(OSError, JournalError):  # what cannot be read is not said
        for directory in sorted(job.iterdir()):
            label = journal.attempt_and_check(directory.name)
            if label is None or label[0] >= attempt:
                continue
            for entry in journal.read_all(directory, journal.MASTER):
                done = entry.record
                if (
                    isinstance(done, ActionDone)
                    and done.action is Action.EXCLUDE
                    and done.succeeded
                ):
                    left |= dict.fromkeys(done.nodes)
    return list(left)


def _prior(root: Path, run: RunStarted, environ: Mapping[str, str]) -> dict[str, float]:
    """Return how likely the nodes of a run are to be bad, by their history and this job's."""
    own = priors.of_job(root, run.cluster, run.job_id, os.geteuid())
    sites = priors.of_site(config.standings(environ), run.cluster, run.nodes, now_s=time.time())
    known = {node: max(own.get(node, 0.0), sites.get(node, 0.0)) for node in run.nodes}
    return {node: likely for node, likely in known.items() if likely}


def check_local(
    count: int, settings: CheckSettings, environ: Mapping[str, str], *, now_s: float
) -> FinishedCheck:
    """Check this machine without Slurm, with `count` agents that play nodes.

    Raises:
        JournalError: the journal cannot be used.
    """
    started = RunStarted(
        run_id=_run_id(settings),
        job_id=int(now_s),
        attempt=0,
        cluster=LOCAL_CLUSTER,
        partition="",
        nodes=[f"local{number}" for number in range(count)],
        master_node=socket.gethostname(),
        user=getpass.getuser(),
        slurm_health=__version__,
        settings=settings.recorded(),
    )
    directory, started = journal.directory_of_check(settings.journal_root, started)
    command = _agent_command(directory, started, settings)
    launcher = LocalLauncher(command, settings.probe_environ, started.nodes)
    expectations = config.expectations(environ)
    if share_devices(started.nodes, visible_devices(settings.probe_environ)):
        # What one node takes of a device another lacks, as of the cores of a CPU.
        expectations = {}
        usual = USUAL[DeviceKind.CPU]
        floors = {"network_floor": usual.network_floor, "compute_floor": usual.compute_floor}
        settings = replace(settings, localize={**floors, **settings.localize})
    return _check(directory, started, settings, launcher, expectations, environ)


def _check(
    directory: Path,
    started: RunStarted,
    settings: CheckSettings,
    launcher: Launcher,
    expectations: Mapping[str, Expectation],
    environ: Mapping[str, str],
) -> FinishedCheck:
    controller = Controller(
        started.nodes,
        # As its first master recorded it: one that takes over has to plan the same.
        functools.partial(make_localizer, prior=started.prior),
        settings.limits,
        settings.phases,
        expectations,
        settings.localize,
        settings.light,
    )
    master = Master(
        directory,
        controller,
        launcher,
        progress=settings.progress,
        alive=settings.alive,
        load_ahead=load_ahead,
    )
    with master.led(started, lambda: _became(environ)) as verdict:
        from slurm_health.preflight.master.after_verdict import conclude

        # The workers still hold the devices: the job must not start beside them.
        launcher.stop(LEAVE_S + poll_interval_s(len(started.nodes)))
        finished = conclude(verdict, master, started, directory, settings, environ)
    settings.tell(finished, directory)
    return FinishedCheck(directory=directory, verdict=verdict, finished=finished)


# What a check does not need before its agents are started is loaded after that.


def _client(environ: Mapping[str, str], *, patience_s: float) -> Client:
    from slurm_health.system.slurm.client import Client

    return Client(environ, patience_s=patience_s)


def _became(environ: Mapping[str, str]) -> str:
    """Return what became of the job that ends this check."""
    from slurm_health.system.slurm import last_word

    return last_word.became(environ, now_s=time.time())


def load_ahead() -> None:
    """Load what a check needs only once its agents are ready, or later.

    Loading torch takes them longer than this takes, and the first round, or what is done about
    the verdict, need not wait for it then.
    """
    import slurm_health.preflight.localize.localizer
    import slurm_health.preflight.master.after_verdict  # noqa: F401


def make_localizer(
    nodes: Sequence[str],
    topology: Mapping[str, Sequence[str]] | None,
    settings: LocalizeSettings,
    prior: Mapping[str, float] | None = None,
) -> RoundPlanner:
    """Return the Localizer that plans the rounds of a run and judges its nodes."""
    # With numpy, which takes a while to load: see load_ahead.
    from slurm_health.preflight.localize.localizer import Localizer

    return Localizer(nodes=list(nodes), topology=topology, prior=prior, settings=settings)


def agent_command(
    directory: Path,
    *,
    run_id: str,
    nodes: int,
    python: str,
    programs: Sequence[str] | None = None,
) -> AgentCommand:
    """Return how the agents of a run on so many nodes are started.

    `programs` are the only files of own probes that they run, None for any: orders that come from
    another machine name no others.
    """

    def command(launch: int, node: str | None) -> list[str]:
        arguments = [
            f"--directory={directory}",
            f"--run-id={run_id}",
            f"--launch={launch}",
            f"--python={python}",
            f"--poll-s={poll_interval_s(nodes):g}",
            f"--silence-s={SILENCE_S:g}",
        ]
        if programs is not None:
            arguments.append(f"--programs={','.join(programs)}")
        if node is not None:
            arguments.append(f"--node={node}")
        return list(own_command("agent", *arguments))

    return command


def _agent_command(directory: Path, started: RunStarted, settings: CheckSettings) -> AgentCommand:
    return agent_command(
        directory,
        run_id=started.run_id,
        nodes=len(started.nodes),
        python=settings.python,
    )


def _run_id(settings: CheckSettings) -> str:
    return settings.run_id or os.urandom(4).hex()
