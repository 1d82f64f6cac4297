# SPDX-License-Identifier: Apache-2.0
"""Has a torchrun command line read by the torchrun of the job's own interpreter."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from slurm_health.preflight.master.job_environment import find_python
from slurm_health.preflight.options import Door, options_of
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode
from slurm_health.system.processes import run_in_foreground
from slurm_health.torchrun.arguments import Arguments

_OPTIONS = options_of(Door.RUN)
_READER = Path(__file__).parents[1] / "preflight" / "probes" / "torchrun_arguments.py"
# Loading torch from a cold network filesystem can take minutes.
_DEADLINE_S = 600.0
# The help, and a command line that is refused; with any other code the trouble is this node's own.
_SAME_EVERYWHERE = {ExitCode.HEALTHY, ExitCode.USAGE}


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
    own = {
        name: _OPTIONS[name].parsed(
            "" if value is True else str(value), "command line", f"--{name}"
        )
        for name, value in found.own.items()
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
    options = [(each.name, each.kind.metavar, each.described) for each in _OPTIONS.values()]
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
