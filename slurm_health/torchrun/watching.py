# SPDX-License-Identifier: Apache-2.0
"""What watches a training that `run` becomes: as in a job of `sbatch`, by the first node.

Torchrun starts the monitor beside its workers (`in_job.watched_torchrun`). In a job whose batch
script slurm-health started, that script's monitor and its post-mortem see all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_health.preflight import config
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.preflight.supervisor.monitor_process import AFTER_S
from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal, killable
from slurm_health.system.processes import own_module
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.check import say
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import Start
from slurm_health.training.monitor.agent import TRAINING

_READ_S = 10.0  # for the journal of a job, which takes milliseconds where its filesystem is well
_WATCHED = b"watched"


def is_on(place: TaskPlace, arguments: Arguments, environ: Mapping[str, str]) -> bool:
    """Tell whether the training is to be watched, and nothing else watches it."""
    if mode(arguments) == OnHang.OFF.value:
        return False
    root = config.journal_root(arguments.text("journal"), environ)
    return "SLURM_JOB_ID" not in environ or not _is_watched(place, root)


def marked(environ: Mapping[str, str], *, alone: bool = False) -> dict[str, str]:
    """Return what marks the processes of this training where no job of Slurm's does.

    A node that trains `alone` may do so beside others of the same job.
    """
    if "SLURM_JOB_ID" in environ and not alone:
        return {}
    return {TRAINING: secrets.token_hex(8)}


def monitor(
    place: TaskPlace, starting: Start, arguments: Arguments, environ: Mapping[str, str]
) -> Sequence[str]:
    """Return the monitor's command if this process, the first that trains, is to start one."""
    if starting.nodes[:1] != (place.node,):
        return ()
    training, step = environ.get(TRAINING), environ.get("SLURM_STEP_ID")
    return own_module(
        "slurm_health.training.monitor.watch",
        f"--directory={starting.directory or ''}",
        f"--on-hang={mode(arguments)}",
        f"--after-s={AFTER_S:g}",
        "--tell",
        # Another step of the job may be another training.
        *([f"--training={training}"] if training else [f"--step={step}"] if step else []),
    )


def node_agent(place: TaskPlace, environ: Mapping[str, str]) -> Sequence[str]:
    """Return the command of this node's agent where no srun can start it, else nothing."""
    training = environ.get(TRAINING)
    if not training:
        return ()
    return own_module(
        "slurm_health.training.monitor.agent",
        f"--job={training}",
        f"--variable={TRAINING}",
        f"--node={place.node}",
        f"--began-s={time.time():.3f}",
    )


def mode(arguments: Arguments) -> str:
    """Return what is to be done about a hang."""
    return arguments.text("monitor") or OnHang.REPORT.value


def _is_watched(place: TaskPlace, root: Path) -> bool:
    """Tell whether the supervisor of this attempt's batch script has it watched.

    Where the journal cannot be read it is not known; a filesystem that hangs must not keep the
    training from starting, so a child reads it.
    """

    def read() -> bytes:
        runs = journal.runs_of(root, place.cluster, str(place.array or place.job_id))
        started = any(
            isinstance(entry.record, ScriptStarted)
            for run in runs
            if (journal.attempt_and_check(run.name) or (-1,))[0] == place.attempt
            for entry in journal.read_all(run, journal.SUPERVISOR)
        )
        return _WATCHED if started else b""

    match killable.run_one(read, _READ_S):
        case killable.Answered(data=data):
            return data == _WATCHED
        case killable.Hung(limit_s=limit_s):
            silent = f"journal {root}: its filesystem did not answer within {limit_s:g} s"
            say(f"{place.node}: {silent}; not known to be watched, the training is by us")
    return False
