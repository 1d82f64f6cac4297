# SPDX-License-Identifier: Apache-2.0
"""One check from end to end: where it runs, its journal, its master, and what follows."""

from __future__ import annotations

import functools
import getpass
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from slurm_health import __version__, config, journal
from slurm_health.acting.job_facts import slurm_name
from slurm_health.agent.node_facts import visible_devices
from slurm_health.core.acting.decide import exit_code
from slurm_health.core.acting.policy import Policy
from slurm_health.core.acting.unchecked import OnUnchecked
from slurm_health.core.allocation import Allocation
from slurm_health.core.expectations import Expectation
from slurm_health.core.localize.settings import USUAL, Device, LocalizeSettings
from slurm_health.core.nodeset import fold
from slurm_health.core.played_nodes import share_devices
from slurm_health.core.records import (
    Disposition,
    Record,
    RunFinished,
    RunStarted,
    Unchecked,
    VerdictReached,
)
from slurm_health.core.session.phase_runner import Localizer
from slurm_health.core.session.phases import Phase
from slurm_health.core.session.session import Limits
from slurm_health.core.verdict import NodeVerdict
from slurm_health.errors import ConfigError, ExitCode
from slurm_health.master import earlier_findings, site_history, verdict_log
from slurm_health.master.launcher import (
    LEAVE_S,
    AgentCommand,
    Launcher,
    LocalLauncher,
    SlurmLauncher,
)
from slurm_health.master.master import SILENCE_S, Master, poll_interval_s
from slurm_health.probe_choice import FIND_TORCH
from slurm_health.processes import own_command, run
from slurm_health.slurm.client import Client

LOCAL_CLUSTER = "local"
_GRES_S = 20.0
_FIND_TORCH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What a check is told by its command line, its environment and the batch script.

    `localize` holds what was chosen of `core.localize.settings.OPTIONS`. `tell` is told how the
    run ends: when it has, and before a requeue is asked for that ends this process with the job.
    `alive` is called as the check gets on. `run_id` is set by whoever starts a check that was
    killed again, to hear of one run only.
    `at_fault` are nodes that are not checked: what is known already is acted on with the verdict.
    `probe_environ` is what the agents and their workers get, the check's own environment where it
    is None; `setup` is the file that made it.
    """

    journal_root: Path
    python: str
    policy: Policy
    limits: Limits
    phases: tuple[Phase, ...]
    localize: Mapping[str, object] = field(default_factory=dict)
    cpu_workers: int = 1
    progress: Callable[[str], None] | None = None
    act: bool = False
    on_unchecked: OnUnchecked = OnUnchecked.PROCEED
    script: str = ""
    submit_time_s: int | None = None
    tell: Callable[[RunFinished, Path], None] = lambda *_: None
    alive: Callable[[], None] = lambda: None
    run_id: str = ""
    setup: str = ""
    probe_environ: Mapping[str, str] | None = None
    at_fault: tuple[NodeVerdict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FinishedCheck:
    """How a check ended, and where its journal lies."""

    directory: Path
    verdict: VerdictReached
    finished: RunFinished


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
        script=settings.script,
        submit_time_s=settings.submit_time_s,
        settings=_recorded(settings),
    )
    wanted = msgspec.structs.replace(wanted, prior=_prior(root, wanted, environ))
    directory, started = journal.directory_of_check(root, wanted)
    if started.array:
        journal.link_array_task(root, started)
    launcher = SlurmLauncher(
        allocation.job_id,
        _agent_command(directory, started, settings),
        _probe_environ(settings, environ),
        # Asked for less long than agents wait for a silent master.
        functools.partial(Client(environ, patience_s=_GRES_S).gres, slurm_name(started)),
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


def _prior(root: Path, run: RunStarted, environ: Mapping[str, str]) -> dict[str, float]:
    """Return how likely the nodes of a run are to be bad, by their history and this job's."""
    own = earlier_findings.prior(root, run.cluster, run.job_id, os.geteuid())
    sites = site_history.prior(config.standings(environ), run.cluster, run.nodes, now_s=time.time())
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
        settings=_recorded(settings),
    )
    directory, started = journal.directory_of_check(settings.journal_root, started)
    probe_environ = _probe_environ(settings, environ)
    command = _agent_command(directory, started, settings)
    launcher = LocalLauncher(command, probe_environ, started.nodes)
    expectations = config.expectations(environ)
    if share_devices(started.nodes, visible_devices(probe_environ)):
        # What one node takes of a device another lacks, as of the cores of a CPU.
        expectations = {}
        usual = USUAL[Device.CPU]
        floors = {"network_floor": usual.network_floor, "compute_floor": usual.compute_floor}
        settings = replace(settings, localize={**floors, **settings.localize})
    return _check(directory, started, settings, launcher, expectations, environ)


def find_python(chosen: str | None, environ: Mapping[str, str]) -> str:
    """Return the interpreter that runs the probes: the chosen one, the job's own, or ours.

    Raises:
        ConfigError: none of them has torch.
    """
    if chosen is not None:
        path = shutil.which(chosen, path=environ.get("PATH"))
        if path is None:
            raise ConfigError("--python", chosen, "no such executable on this node")
        return path
    candidates = [shutil.which("python3", path=environ.get("PATH")), sys.executable]
    tried = list(dict.fromkeys(path for path in candidates if path))
    for path in tried:
        if _has_torch(path, environ):
            return path
    raise ConfigError(
        "--python",
        "torch",
        f"not found by {' or '.join(tried)}; name the interpreter your job trains with"
        " (in a script: #HEALTH --python=PATH),"
        " or install torch beside slurm-health: pip install 'slurm-health[probes]'",
    )


def _check(
    directory: Path,
    started: RunStarted,
    settings: CheckSettings,
    launcher: Launcher,
    expectations: Mapping[str, Expectation],
    environ: Mapping[str, str],
) -> FinishedCheck:
    master = Master(
        directory,
        started.nodes,
        launcher,
        limits=settings.limits,
        phases=settings.phases,
        # As its first master recorded it: one that takes over has to plan the same.
        make_localizer=functools.partial(make_localizer, prior=started.prior),
        expectations=expectations,
        localize_options=settings.localize,
        progress=settings.progress,
        alive=settings.alive,
        load_ahead=load_ahead,
    )
    try:
        master.open(started)
        verdict = master.run()
        # The workers still hold the devices: the job must not start beside them.
        launcher.stop(LEAVE_S + poll_interval_s(len(started.nodes)))
        agents = master.session.state.agents
        blind = [name for name, node in agents.items() if node.no_journal]
        over = [node.failed for node in agents.values() if node.job_ended]
        before = master.session.state.finished
        if before is not None and not before.disposition.leaves:
            finished = before  # acted on to the end, and only not heard: the job is as it says
        elif over:
            finished = _job_ended(over[0])
            master.finish(finished)
        else:
            finished = _conclude(master, verdict, blind, started, directory, settings, environ)
            master.finish(finished)
        if before is None and config.verdicts_to_machine_log(environ):
            verdict_log.tell(verdict, started, finished)
    except (KeyboardInterrupt, SystemExit) as end:
        master.note_end(end)
        raise
    finally:
        master.close()
    settings.tell(finished, directory)
    return FinishedCheck(directory=directory, verdict=verdict, finished=finished)


def _conclude(
    master: Master,
    verdict: VerdictReached,
    blind: Sequence[str],
    started: RunStarted,
    directory: Path,
    settings: CheckSettings,
    environ: Mapping[str, str],
) -> RunFinished:
    """Act on the verdict if told to; nodes that are `blind` do not see the journal."""
    from slurm_health.acting.perform import act
    from slurm_health.acting.requeue_helper import Helper
    from slurm_health.acting.unchecked import end_unchecked

    def append(record: Record) -> None:
        master.append(record)
        if isinstance(record, RunFinished):
            settings.tell(record, directory)

    if blind:  # what was found is not worth acting on
        return end_unchecked(
            _not_shared(directory, blind),
            settings.on_unchecked,
            job=slurm_name(started) if settings.act else "",
            client=Client(environ, patience_s=0.0),
            append=append,
            in_journal=False,
        )
    if not settings.act:
        return RunFinished(
            disposition=Disposition.PROCEED,
            exit_code=exit_code(verdict),
            reason="only checked",
        )
    helper = Helper(
        command=own_command("requeue-helper"),
        directory=directory,
        environ=environ,
        uid=os.getuid(),
    )
    if settings.at_fault:
        verdict = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *settings.at_fault])
        append(verdict)
    return act(
        verdict,
        started=started,
        directory=directory,
        policy=settings.policy,
        client=Client(environ),
        uid=os.getuid(),
        append=append,
        helper=helper,
        site_file=config.site_file(environ),
    )


def _job_ended(said: str) -> RunFinished:
    """End the run of a job that was cancelled, or failed its prolog: its script is not started.

    Slurm ends the batch step of such a job, but not always before the check is done.
    """
    return RunFinished(
        disposition=Disposition.STOP,
        exit_code=ExitCode.UNAVAILABLE,
        reason=f"Slurm has ended it already ({said}); squeue or sacct may say why",
    )


def _not_shared(directory: Path, blind: Sequence[str]) -> Unchecked:
    return Unchecked(
        reason=f"the journal {directory} cannot be used from {fold(blind)}",
        remedy="name a directory on a filesystem that all nodes share with --journal or"
        " SLURM_HEALTH_JOURNAL",
    )


def load_ahead() -> None:
    """Load what a check needs only once its agents are ready, or later.

    Loading torch takes them longer than this takes, and the first round, or what is done about
    the verdict, need not wait for it then.
    """
    import slurm_health.acting.perform
    import slurm_health.acting.requeue_helper
    import slurm_health.acting.unchecked
    import slurm_health.core.localize.localizer  # noqa: F401


def make_localizer(
    nodes: Sequence[str],
    topology: Mapping[str, Sequence[str]] | None,
    settings: LocalizeSettings,
    prior: Mapping[str, float] | None = None,
) -> Localizer:
    """Return the Localizer that plans the rounds of a run and judges its nodes."""
    # With numpy, which takes a while to load: see load_ahead.
    from slurm_health.core.localize.localizer import Localizer as SieveLocalizer

    return SieveLocalizer(nodes=list(nodes), topology=topology, prior=prior, settings=settings)


def agent_command(
    directory: Path, *, run_id: str, nodes: int, python: str, cpu_workers: int = 1
) -> AgentCommand:
    """Return how the agents of a run on so many nodes are started."""

    def command(launch: int, node: str | None) -> list[str]:
        arguments = [
            f"--directory={directory}",
            f"--run-id={run_id}",
            f"--launch={launch}",
            f"--python={python}",
            f"--poll-s={poll_interval_s(nodes):g}",
            f"--silence-s={SILENCE_S:g}",
            f"--cpu-workers={cpu_workers}",
        ]
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
        cpu_workers=settings.cpu_workers,
    )


def _probe_environ(settings: CheckSettings, environ: Mapping[str, str]) -> Mapping[str, str]:
    return environ if settings.probe_environ is None else settings.probe_environ


def _run_id(settings: CheckSettings) -> str:
    return settings.run_id or secrets.token_hex(4)


def _recorded(settings: CheckSettings) -> dict[str, str | int | float | bool]:
    """Return the settings in force, so that a report explains itself."""
    return {
        "python": settings.python,
        "check": ",".join(probe.name for phase in settings.phases for probe in phase.probes),
        **({"setup": settings.setup} if settings.setup else {}),
        "act": settings.act,
        "max_requeues": settings.policy.max_requeues,
        "on_straggler": settings.policy.on_straggler.value,
        "on_inconclusive": settings.policy.on_inconclusive.value,
        "at_requeue_limit": settings.policy.at_requeue_limit.value,
        "on_unchecked": settings.on_unchecked.value,
        "round_deadline_s": settings.limits.round_deadline_s,
        **{name: str(value) for name, value in settings.localize.items()},
    }


def _has_torch(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = run([python, "-c", FIND_TORCH], environ=environ, deadline_s=_FIND_TORCH_S)
    except OSError:  # it cannot be executed, or does not end
        return False
    return done.returncode == 0
