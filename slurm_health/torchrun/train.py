# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` from end to end: read, check if told to, become torchrun.

A torchrun command line is read by the torchrun of the job's own interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
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

from slurm_health.preflight.decide.policy import Heartbeat
from slurm_health.preflight.master.job_environment import find_python
from slurm_health.preflight.options import FOR_RUN, given_in
from slurm_health.preflight.supervisor.monitor_process import heartbeat_environ
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode, UsageError
from slurm_health.system.processes import own_module, run_in_foreground
from slurm_health.system.signals import leaving_on
from slurm_health.torchrun import watching
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
from slurm_health.torchrun.restarts import Context
from slurm_health.torchrun.step import Start
from slurm_health.training.monitor.agent import TRAINING

_TORCHRUN = ("-m", "torch.distributed.run")
# The job's own interpreter runs these, and need not have slurm-health installed.
_IN_JOB = Path(__file__).with_name("in_job")
_WATCHED_TORCHRUN = _IN_JOB / "watched_torchrun.py"
_READER = _IN_JOB / "arguments.py"
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
    own = _own_environ(environ)
    starting = Start(nodes=place.nodes if place else ())
    torchrun: Sequence[str] = _TORCHRUN
    told: dict[str, object] | None = None
    if arguments.checks:
        if here.meeting is not None and here.leads:
            here = named(here)
        within = _bounds(here, arguments, environ, alone=alone)
        with _ended_in_order():
            found = checked(here, within, arguments, python, environ)
        if isinstance(found, int):
            return found
        starting = found
        if arguments.restarts:
            context = _context(here, within, found, arguments, python, environ, alone=alone)
            told = _told(context, within)
    if watching.is_on(here, arguments, environ) and _is_known(place, arguments):
        if told is None:
            told = _told_unchecked(here, starting, arguments, python, environ, alone=alone)
        own |= watching.marked(environ, alone=alone)
        trains = replace(starting, nodes=(here.node,)) if alone else starting
        told["monitor"] = watching.monitor(here, trains, arguments, own)
        told["node_agent"] = watching.node_agent(here, own)
    if told is not None:
        torchrun = (str(_WATCHED_TORCHRUN), str(_handed_over(told)))
    if arguments.text("heartbeat") != Heartbeat.OFF.value:
        own |= heartbeat_environ(environ)
    team = None
    if not alone and place is not None:
        team = team_of(place, starting.nodes, starting.addresses, arguments.given, environ)
    return _become(python, [*torchrun, *command_line(arguments, team, environ)], own)


def _handed_over(facts: Mapping[str, object]) -> int:
    """Return the number of an open file with what is known, which the next program inherits."""
    file = os.memfd_create("slurm-health", 0)
    with os.fdopen(file, "wb", closefd=False) as writing:
        writing.write(msgspec.json.encode(facts))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the training inherits: no secret, and no mark of a training around it."""
    own = dict(without_secret(environ))
    own.pop(TRAINING, None)
    return own


def _is_known(place: TaskPlace | None, arguments: Arguments) -> bool:
    """Tell whether it is known who trains; several nodes without ranks know only each other."""
    several = "nnodes" in arguments.given and not trains_alone(arguments)
    if place is None and several:
        say("this training is not watched: the node's rank is not known (NODE_RANK, --node-rank)")
    return place is not None or not several


def _bounds(
    place: TaskPlace, arguments: Arguments, environ: Mapping[str, str], *, alone: bool
) -> Bounds:
    joins = "SLURM_JOB_ID" in environ and may_be_joined(arguments.given)
    return bounds(arguments.given.get("nnodes"), len(place.nodes), alone=alone, joins=joins)


def _context(
    place: TaskPlace,
    within: Bounds,
    starting: Start,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
    *,
    alone: bool,
) -> Context:
    """Return what is known now, and needed when workers have failed."""
    nodes = (place.node,) if alone else starting.nodes
    if alone and len(place.nodes) > 1:  # the others have failures of their own
        place = replace(place, start=f"{place.start}.{place.node}")
    place = (
        replace(place, nodes=nodes)
        if alone
        else place_among(place, starting.nodes, starting.addresses)
    )
    least = within.least if within.least < within.most and not alone else len(nodes)
    if within.joins:
        least, _ = node_range(arguments.given["nnodes"])
    return Context(
        place=place,
        arguments=arguments,
        python=python,
        least=least,
        shared_secret=environ.get(KEY_VARIABLE, ""),
    )


def _told_unchecked(
    place: TaskPlace,
    starting: Start,
    arguments: Arguments,
    python: str,
    environ: Mapping[str, str],
    *,
    alone: bool,
) -> dict[str, object]:
    """Return the same for nodes that were not checked: they may be, once workers have failed."""
    within = _bounds(place, arguments, environ, alone=alone)
    if place.chosen_start and place.meeting is None:
        where = node_zero_address(arguments.given, environ, place.port)
        place = replace(place, meeting=where)
    if place.meeting is not None and place.leads:
        place = named(place)
    context = _context(place, within, starting, arguments, python, environ, alone=alone)
    return _told(context, within)


def _told(context: Context, within: Bounds) -> dict[str, object]:
    """Return what torchrun is told, to ask us by."""
    return {
        "command": own_module("slurm_health.torchrun.restarts"),
        "node": context.place.node,
        "leads": not within.joins and context.place.leads,
        "context": context,
    }


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
    """The parser has said what there was to say: the help, or what is wrong."""

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
    # Only the parser knows where the options end, and only an interpreter has the parser.
    guess = _perhaps_named(argv)
    if guess is not None and shutil.which(guess, path=environ.get("PATH")) is None:
        guess = None
    python = find_python(guess, environ)
    found = _ask(python, argv, environ, speaks=speaks)
    if found.text("python") != guess:
        python = find_python(found.text("python"), environ)
        found = _ask(python, argv, environ, speaks=speaks)
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in found.own.items()
    ]
    own = {
        name.replace("_", "-"): value
        for name, value in given_in(words, "command line", FOR_RUN).items()
    }
    return python, msgspec.structs.replace(found, own=own)


def _perhaps_named(argv: Sequence[str]) -> str | None:
    """Return what follows the first `--python`, which may be an option of the script's."""
    for word, following in zip_longest(argv, argv[1:]):
        if word.startswith("--python="):
            return word.partition("=")[2]
        if word == "--python":
            return following
    return None


def _ask(
    python: str, argv: Sequence[str], environ: Mapping[str, str], *, speaks: bool
) -> Arguments:
    options = [(each.name, each.metavar, each.help) for each in FOR_RUN]
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
        os.set_inheritable(answer.fileno(), True)
        words = [str(answer.fileno()), json.dumps(options), *argv]
        try:
            code = run_in_foreground(
                [python, str(_READER), *words],
                environ=environ,
                stdin=b"",
                output=None if speaks else said,
                deadline_s=_DEADLINE_S,
            )
        except TimeoutError:
            raise ConfigError(
                "--python", python, f"has not loaded torch within {_DEADLINE_S:.0f} s"
            ) from None
        except OSError as err:
            raise ConfigError("--python", python, f"cannot be run: {err.strerror}") from err
        answer.seek(0)
        found = answer.read()
        if code not in _SAME_EVERYWHERE:
            said.seek(0)
            sys.stderr.buffer.write(said.read())
    if code != 0 or not found:
        raise ParserEnded(code)
    return from_json(found, Arguments)
