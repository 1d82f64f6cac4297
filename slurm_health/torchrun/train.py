# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` from end to end: read, check if asked to, become torchrun.

A torchrun command line is read by the torchrun of the job's own interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import msgspec

from slurm_health.preflight import config
from slurm_health.preflight.decide.policy import Heartbeat, OnHang
from slurm_health.preflight.master.job_environment import find_python
from slurm_health.preflight.options import FOR_RUN, given_in
from slurm_health.preflight.supervisor.monitor_process import AFTER_S, heartbeat_environ
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode, UsageError
from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal, killable
from slurm_health.system.processes import own_module, run_in_foreground
from slurm_health.system.signals import leaving_on
from slurm_health.torchrun.arguments import (
    Arguments,
    command_line,
    node_range,
    node_zero_address,
    trains_alone,
)
from slurm_health.torchrun.check import KEY_VARIABLE, checked, say, without_secret
from slurm_health.torchrun.node_choice import Bounds, bounds
from slurm_health.torchrun.place import (
    TaskPlace,
    find,
    may_be_joined,
    named,
    place_among,
    single,
    speaks_for_step,
    team_of,
)
from slurm_health.torchrun.restarts import Context, on_hang
from slurm_health.torchrun.step import Start
from slurm_health.training.monitor.agent import TRAINING

# The job's own interpreter runs these, and need not have slurm-health installed.
_IN_JOB = Path(__file__).with_name("in_job")
_WATCHED_TORCHRUN = _IN_JOB / "watched_torchrun.py"
_READER = _IN_JOB / "arguments.py"
_JOURNAL_S = 10.0  # for what takes milliseconds on a filesystem that is well
# Loading torch from a cold network filesystem can take minutes.
_DEADLINE_S = 600.0
# The help, and a command line that is refused; with any other code the trouble is this node's own.
_SAME_EVERYWHERE = {ExitCode.HEALTHY, ExitCode.USAGE}


def train(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become torchrun, or return the code of a node on which nothing is trained.

    Raises:
        SlurmHealthError: the command line, the surroundings or the journal cannot be used.
    """
    speaks = speaks_for_step(environ)
    try:
        return _train(*read(argv, environ, speaks=speaks), environ)
    except ParserEnded as ended:
        return ended.exit_code
    except UsageError as err:  # the same in all tasks
        if speaks:
            raise
        return err.exit_code


def _train(python: str, arguments: Arguments, environ: Mapping[str, str]) -> int:
    place = find(arguments, environ)
    alone = place is None or trains_alone(arguments)
    here = place or single(environ, host=socket.gethostname(), now_s=int(time.time()))
    several = "nnodes" in arguments.given and not trains_alone(arguments)
    known = place is not None or not several  # nodes without ranks know only themselves
    monitored = is_to_watch(here, arguments, environ)
    if monitored and not known:
        monitored = False
        say("this training is not watched: the node's rank is not known (NODE_RANK, --node-rank)")
    start = Start(nodes=here.nodes if place else ())
    own = without_secret(environ)
    own.pop(TRAINING, None)  # of a training around this one
    torchrun: list[str] = ["-m", "torch.distributed.run"]
    if arguments.checks or monitored:
        joins = "SLURM_JOB_ID" in environ and may_be_joined(arguments.given)
        within = bounds(arguments.given.get("nnodes"), len(here.nodes), alone=alone, joins=joins)
        if here.chosen_start and here.meeting is None and not arguments.checks:
            # Of a check before a restart; the training itself meets as it always does.
            where = node_zero_address(arguments.given, environ, here.port)
            checks_at = replace(here, meeting=where)
        else:
            checks_at = here
        if checks_at.meeting is not None and checks_at.leads:
            checks_at = named(checks_at)
        if arguments.checks:
            here = checks_at
            with _ended_in_order():
                outcome = checked(here, within, arguments, python, environ)
            if isinstance(outcome, int):
                return outcome
            start = outcome
        if monitored and ("SLURM_JOB_ID" not in environ or alone):
            # A mark of the training's processes; in a job of Slurm's they are those of the step.
            own[TRAINING] = secrets.token_hex(8)
        if monitored or arguments.restarts:
            trains = replace(start, nodes=(here.node,)) if alone else start
            facts = _facts(checks_at, trains, within, arguments, python, environ, alone=alone)
            if monitored:
                facts |= monitor_commands(here, trains, arguments, own)
            torchrun = [str(_WATCHED_TORCHRUN), str(_handed_over(facts))]
    if arguments.text("heartbeat") != Heartbeat.OFF.value:
        own |= heartbeat_environ(environ)
    team = None
    if not alone and place is not None:
        team = team_of(here, start.nodes, start.addresses, arguments.given, environ)
    return _become(python, [*torchrun, *command_line(arguments, team, environ)], own)


def _facts(
    place: TaskPlace,
    start: Start,
    within: Bounds,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
    *,
    alone: bool,
) -> dict[str, object]:
    """Return what torchrun needs to ask `restarts`, and what that needs to answer."""
    least = within.least if within.least < within.most and not alone else len(start.nodes)
    if within.joins:
        least, _ = node_range(arguments.given["nnodes"])
    if not alone:
        place = place_among(place, start.nodes, start.addresses)
    elif len(place.nodes) > 1:  # the others have failures of their own
        place = replace(place, start=f"{place.start}.{place.node}", nodes=start.nodes)
    context = Context(
        place=place,
        arguments=arguments,
        python=python,
        least=least,
        shared_secret=environ.get(KEY_VARIABLE, ""),
    )
    return {
        "command": own_module("slurm_health.torchrun.restarts"),
        "node": place.node,
        "leads": not within.joins and place.leads,
        "context": context,
    }


def _handed_over(facts: Mapping[str, object]) -> int:
    """Return the number of an open file with what is known, which the next program inherits."""
    file = os.memfd_create("slurm-health", 0)
    with os.fdopen(file, "wb", closefd=False) as writing:
        writing.write(msgspec.json.encode(facts))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def monitor_commands(
    place: TaskPlace, start: Start, arguments: Arguments, environ: Mapping[str, str]
) -> dict[str, object]:
    """Return the commands of the monitor, on the first node that trains, and of the node's agent.

    Where srun can start the agents, torchrun starts none.
    """
    training, step = environ.get(TRAINING), environ.get("SLURM_STEP_ID")
    commands: dict[str, object] = {}
    if start.nodes[:1] == (place.node,):
        commands["monitor"] = own_module(
            "slurm_health.training.monitor.watch",
            f"--directory={start.directory or ''}",
            f"--on-hang={on_hang(arguments)}",
            f"--after-s={AFTER_S:g}",
            "--tell",
            # Another step of the job may be another training.
            *([f"--training={training}"] if training else [f"--step={step}"] if step else []),
        )
    if training:
        commands["node_agent"] = own_module(
            "slurm_health.training.monitor.agent",
            f"--job={training}",
            f"--variable={TRAINING}",
            f"--node={place.node}",
            f"--began-s={time.time():.3f}",
        )
    return commands


def is_to_watch(place: TaskPlace, arguments: Arguments, environ: Mapping[str, str]) -> bool:
    """Tell whether the training is to have a monitor: the batch script's own may watch it already.

    Where the journal cannot be read that is not known; a filesystem that hangs must not keep the
    training from starting, so a child reads it.
    """
    if on_hang(arguments) == OnHang.OFF.value or "SLURM_JOB_ID" not in environ:
        return on_hang(arguments) != OnHang.OFF.value
    root = config.journal_root(arguments.text("journal"), environ)

    def read_journal() -> bytes:
        runs = journal.runs_of(root, place.cluster, str(place.array or place.job_id))
        started = any(
            isinstance(entry.record, ScriptStarted)
            for run in runs
            if (journal.attempt_and_check(run.name) or (-1,))[0] == place.attempt
            for entry in journal.read_all(run, journal.SUPERVISOR)
        )
        return b"watched" if started else b""

    match killable.run_one(read_journal, _JOURNAL_S):
        case killable.Answered(data=data):
            return not data
        case killable.Hung(limit_s=limit_s):
            silent = f"journal {root}: its filesystem did not answer within {limit_s:g} s"
            say(f"{place.node}: {silent}; not known to be watched, the training is by us")
    return True


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM end what is in progress as an error would; torchrun gets it as it was."""
    before = signal.getsignal(signal.SIGTERM)
    with leaving_on(signal.SIGTERM):
        yield
    signal.signal(signal.SIGTERM, before)


def _become(python: str, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process: signals and the exit code are torchrun's own from here on.

    Raises:
        ConfigError: the interpreter cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        # No shell is wanted: the arguments are the user's own, word by word.
        os.execve(python, [python, *arguments], dict(environ))  # noqa: S606
    except OSError as err:
        raise ConfigError("--python", python, f"cannot be run: {err.strerror}") from err


class ParserEnded(Exception):
    """The parser has printed what there was to print: the help, or what is wrong."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)


def read(
    argv: Sequence[str], environ: Mapping[str, str], *, speaks: bool = True
) -> tuple[str, Arguments]:
    """Return the interpreter to train with, and what the command line says.

    Where this process does not speak for its step (`speaks`), it leaves it to another one to print
    the help, or what is wrong with the command line.

    Raises:
        ConfigError: there is no interpreter with torch,
            or one of our options has an impossible value.
        ParserEnded: the command line is refused, or asks for help.
    """
    # Only the parser knows where the options end, and only an interpreter has the parser: what
    # follows the first `--python` may be an option of the script's.
    named = (
        following if word == "--python" else word.partition("=")[2]
        for word, following in zip_longest(argv, argv[1:])
        if word == "--python" or word.startswith("--python=")
    )
    guess = next(named, None)
    if guess is not None and shutil.which(guess, path=environ.get("PATH")) is None:
        guess = None
    python = find_python(guess, environ)
    arguments = _ask(python, argv, environ, speaks=speaks)
    if arguments.text("python") != guess:
        python = find_python(arguments.text("python"), environ)
        arguments = _ask(python, argv, environ, speaks=speaks)
    words = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in arguments.own.items()
    ]
    own = given_in(words, "command line", FOR_RUN)
    return python, msgspec.structs.replace(
        arguments, own={name.replace("_", "-"): value for name, value in own.items()}
    )


def _ask(
    python: str, argv: Sequence[str], environ: Mapping[str, str], *, speaks: bool
) -> Arguments:
    """Return what the parser of an interpreter's torchrun reads.

    Raises:
        ConfigError: the interpreter cannot be run, or does not end in time.
        ParserEnded: the command line is refused, or asks for help.
    """
    options = json.dumps([(option.name, option.metavar, option.help) for option in FOR_RUN])
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as output:
        os.set_inheritable(answer.fileno(), True)
        try:
            code = run_in_foreground(
                [python, str(_READER), str(answer.fileno()), options, *argv],
                environ=environ,
                stdin=b"",
                output=None if speaks else output,
                deadline_s=_DEADLINE_S,
            )
        except TimeoutError:
            problem = f"has not loaded torch within {_DEADLINE_S:.0f} s"
            raise ConfigError("--python", python, problem) from None
        except OSError as err:
            raise ConfigError("--python", python, f"cannot be run: {err.strerror}") from err
        answer.seek(0)
        text = answer.read()
        if code not in _SAME_EVERYWHERE:
            output.seek(0)
            sys.stderr.buffer.write(output.read())
    if code != 0 or not text:
        raise ParserEnded(code)
    return from_json(text, Arguments)
