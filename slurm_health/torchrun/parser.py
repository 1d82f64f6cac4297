# SPDX-License-Identifier: Apache-2.0
"""Has a torchrun command line read by the torchrun of the job's own interpreter."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.errors import ConfigError
from slurm_health.master.run_check import find_python
from slurm_health.torchrun.arguments import Arguments

_READER = Path(__file__).parents[1] / "probes" / "torchrun_arguments.py"
# Loading torch from a cold network filesystem can take minutes.
_DEADLINE_S = 600.0


class Ended(Exception):
    """The parser has said what there was to say: the help, or what is wrong."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(exit_code)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Arguments]:
    """Return the interpreter to train with, and what the command line says.

    Raises:
        ConfigError: there is no interpreter with torch.
        Ended: the command line is refused, or asks for help.
    """
    # Only the parser knows where the options end, and only an interpreter has the parser.
    guess = _perhaps_named(argv)
    if guess is not None and shutil.which(guess, path=environ.get("PATH")) is None:
        guess = None
    python = find_python(guess, environ)
    arguments = _ask(python, argv, environ)
    if arguments.python == guess:
        return python, arguments
    python = find_python(arguments.python, environ)
    return python, _ask(python, argv, environ)


def _perhaps_named(argv: Sequence[str]) -> str | None:
    """Return what follows the first `--python`, which may be an option of the script's."""
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word.startswith("--python="):
            return word.partition("=")[2]
        if word == "--python":
            return following
    return None


def _ask(python: str, argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    with tempfile.TemporaryFile() as answer:
        try:
            done = subprocess.run(
                [python, str(_READER), str(answer.fileno()), *argv],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                pass_fds=(answer.fileno(),),
                timeout=_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "--python", python, f"has not loaded torch within {_DEADLINE_S:.0f} s"
            ) from None
        except OSError as err:
            raise ConfigError("--python", python, f"cannot be run: {err.strerror}") from err
        answer.seek(0)
        found = answer.read()
    if done.returncode != 0 or not found:
        raise Ended(done.returncode if done.returncode >= 0 else 128 - done.returncode)
    return msgspec.json.decode(found, type=Arguments)
