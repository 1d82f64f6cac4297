# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: read the command line, check if asked to, be torchrun."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_health.preflight import config
from slurm_health.preflight.decide.policy import Heartbeat, OnHang
from slurm_health.preflight.master.job_environment import find_python
from slurm_health.preflight.options import FOR_RUN, given_in
from slurm_health.preflight.supervisor.monitor_process import heartbeat_environ
from slurm_health.records.errors import ConfigError, JournalError, UsageError
from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal
from slurm_health.system.signals import leaving_on
from slurm_health.torchrun.arguments import Arguments, Bounds
from slurm_health.torchrun.check import say, without_secret
from slurm_health.torchrun.place import (
    TaskPlace,
    find,
    single,
    speaks_for_step,
)
from slurm_health.torchrun.starts import Training
from slurm_health.training.monitor.agent import TRAINING

_JOURNAL_S = 10.0  # for what takes milliseconds on a filesystem that is well
# Of torchrun's options, those without a value.
_FLAGS = {"standalone", "module", "m", "no-python", "run-path", "virtual-local-rank"}
# What `run` needs to know, or fills in if it is not given.
_READ = {
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "max-restarts",
}


def train(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become torchrun, or return the code of a node on which nothing is trained.

    Raises:
        SlurmHealthError: the command line, the surroundings or the journal cannot be used.
    """
    speaks = speaks_for_step(environ)
    try:
        return _train(*read(argv, environ), environ)
    except UsageError as err:  # the same in all tasks
        if speaks:
            raise
        return err.exit_code


def _train(python: str, arguments: Arguments, environ: Mapping[str, str]) -> int:
    place = find(arguments, environ)
    here = place or single(environ, host=socket.gethostname(), now_s=int(time.time()))
    nnodes = arguments.nnodes
    alone = arguments.trains_alone or (place is None and nnodes is None)
    meets = not alone and place is not None and arguments.meets_by_itself
    monitored = _is_to_watch(here, arguments, environ)
    if monitored and not alone and "SLURM_JOB_ID" not in environ:
        monitored = False  # no srun starts agents on the other nodes
        if arguments.text("monitor") is not None:
            say("this training is not watched: of several nodes, those of a Slurm job are")
    own = without_secret(environ)
    own.pop(TRAINING, None)  # of a training around this one
    if arguments.text("heartbeat") != Heartbeat.OFF.value:
        own |= heartbeat_environ(environ)
    if not (arguments.checks or monitored or arguments.max_restarts):
        meets = False  # there is nothing to decide together
    count = len(here.nodes)
    if alone or place is None:
        within = Bounds(least=1, most=count)
    else:
        within = nnodes or Bounds(least=count, most=count)
    if within.least > count:
        raise UsageError(f"--nnodes={within.text}: there are fewer nodes here: {count}")
    training = Training(
        python=python,
        arguments=arguments,
        environ=environ,
        own=own,
        within=within,
        alone=alone,
        known=place is not None,
        meets=meets,
        monitored=monitored,
    )
    with leaving_on(signal.SIGTERM):  # ends what is in progress as an error would
        return training.run(here)


def _is_to_watch(place: TaskPlace, arguments: Arguments, environ: Mapping[str, str]) -> bool:
    """Return whether the training is to have a monitor: a job of `sbatch` has its own."""
    if arguments.on_hang == OnHang.OFF.value or "SLURM_JOB_ID" not in environ:
        return arguments.on_hang != OnHang.OFF.value
    root = config.journal_root(arguments.text("journal"), environ)
    try:
        journal.await_answer(root, _JOURNAL_S)
        runs = journal.runs_of(root, place.cluster, str(place.array or place.job_id))
        return not any(
            isinstance(entry.record, ScriptStarted)
            for run in runs
            if (journal.attempt_and_check(run.name) or (-1,))[0] == place.attempt
            for entry in journal.read_all(run, journal.SUPERVISOR)
        )
    except (JournalError, OSError):
        return True


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Arguments]:
    """Return the interpreter to train with, and what the command line says.

    Raises:
        ConfigError: there is no such script or interpreter, or one of our options has an impossible
            value.
        NoTorch: there is no interpreter with torch.
        UsageError: there is no script.
    """
    takes_value = {option.name: bool(option.metavar) for option in FOR_RUN}
    known = {*takes_value, *_READ, *_FLAGS}
    words, options, own = list(argv), list[str](), list[str]()
    given = {name: environ.get(f"PET_{name.upper().replace('-', '_')}", "") for name in _READ}
    flags = {"standalone"} if environ.get("PET_STANDALONE", "0") != "0" else set()
    while words and words[0].startswith("-") and words[0] != "--":
        written, equals, value = (word := words.pop(0)).partition("=")
        name = written.lstrip("-").replace("_", "-")
        if written.startswith("--"):  # the beginning of a name will do, as for torchrun
            alike = sorted({name} & known or {full for full in known if full.startswith(name)})
            name = alike[0] if len(alike) == 1 else name
        is_flag = name in _FLAGS or not takes_value.get(name, True)
        attached = equals or (not written.startswith("--") and written[2:])  # -t3
        taken = [word]
        if not (attached or is_flag) and words and not words[0].startswith("--"):
            taken.append(value := words.pop(0))
        if name in takes_value:
            own.append(f"--{name}={value}" if takes_value[name] else f"--{name}")
            continue
        options += taken
        if name in _READ:
            given[name] = value
        flags |= {name} if is_flag else set()
    if not (script := next((word for word in words if word != "--"), "")):
        raise UsageError(
            "no SCRIPT to train with: it follows the options, as in slurm-health run --nnodes=2"
            " train.py"
        )
    if not (flags & {"m", "module", "no-python"} or Path(script).exists()):
        raise ConfigError("SCRIPT", script, f"there is no such script in {Path.cwd()}")
    arguments = Arguments(
        options=options,
        program=words,
        given={name.replace("-", "_"): value for name, value in given.items() if value},
        standalone="standalone" in flags,
        own={
            name.replace("_", "-"): value
            for name, value in given_in(own, "command line", FOR_RUN).items()
        },
    )
    return find_python(arguments.text("python"), environ), arguments
