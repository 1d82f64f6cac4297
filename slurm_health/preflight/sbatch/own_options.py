# SPDX-License-Identifier: Apache-2.0
"""What a job is submitted with: our options on the command line, in variables, in the script.

The command line wins over the environment, the environment over a `#HEALTH` line of the script,
that over the default.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slurm_health.preflight.option_kinds import Value
from slurm_health.preflight.options import Door, SharedOption, options_of
from slurm_health.records.errors import ConfigError

MAGIC = b"#HEALTH"
Settings = Mapping[str, Value]

_OPTIONS = options_of(Door.SBATCH)
_IN_SCRIPT = options_of(Door.SCRIPT)
TAKES_VALUE = {option.name: bool(option.kind.metavar) for option in _OPTIONS.values()}


def from_words(own: Iterable[tuple[str, str | None]]) -> dict[str, Value]:
    """Return the settings of a command line; the last of several wins.

    Raises:
        ConfigError: a value is impossible.
    """
    return {
        name: _OPTIONS[name].parsed(text or "", "command line", f"--{name}") for name, text in own
    }


def from_environ(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the settings of an environment. An empty variable is one that is not set.

    Raises:
        ConfigError: a value is impossible.
    """
    return {
        option.name: option.parsed(environ[option.variable], "environment", option.variable)
        for option in _IN_SCRIPT.values()
        if environ.get(option.variable)
    }


def from_script(lines: Sequence[bytes], source: str) -> dict[str, Value]:
    """Return the settings of the `#HEALTH` lines among the first lines of a script.

    `lines` begin with the script's first line; `source` is what the user calls the script.

    Raises:
        ConfigError: an option is unknown, or a value is missing or impossible.
    """
    settings = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith(MAGIC) and line[len(MAGIC) :][:1].strip() == b"":
            where = f"{source}, line {number}"
            for option, text in _pairs(os.fsdecode(line[len(MAGIC) :]), where):
                settings[option.name] = option.parsed(text, where, f"--{option.name}")
    return settings


def _pairs(text: str, where: str) -> Iterator[tuple[SharedOption, str]]:
    """Read `--name=value` and `--name value`, quoted as in a shell, up to a comment."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as err:
        raise ConfigError(where, "#HEALTH", f"cannot be read: {err}".lower()) from None
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in _IN_SCRIPT:
            valid = [f"--{known}" for known in _IN_SCRIPT]
            raise ConfigError(where, word.partition("=")[0], "unknown #HEALTH option", valid=valid)
        metavar = _IN_SCRIPT[name].kind.metavar
        if not equals and metavar:
            if not words:
                raise ConfigError(where, word, f"needs a value: {word}={metavar}")
            value = words.pop(0)
        yield _IN_SCRIPT[name], value


def for_check(settings: Settings) -> dict[str, Value]:
    """Return those settings that the check in the job takes, too, flags aside."""
    kept = {name for name, option in options_of(Door.CHECK).items() if option.kind.metavar}
    # The supervisor's alone: there is a script to run, to watch and to start again only where it
    # was submitted with one.
    kept |= {"monitor", "collect", "heartbeat", "flight-recorder", "on-unchecked", "max-restarts"}
    return {name: settings[name] for name in _OPTIONS if name in kept and name in settings}


_COLUMN, _WIDTH = 30, 79  # of a terminal with 80 columns


def help_text() -> str:
    """Return what `slurm-health sbatch --help` prints."""
    return _HELP.format(options="\n".join(_described(each) for each in _OPTIONS.values()))


def _described(option: SharedOption) -> str:
    usage = f"  --{option.name}" + (f"={option.kind.metavar}" if option.kind.metavar else "")
    text = option.described
    if option.name in _IN_SCRIPT:
        text += f" Variable: {option.variable}."
    indent = " " * _COLUMN
    first = f"{usage:<{_COLUMN}}" if len(usage) < _COLUMN else f"{usage}\n{indent}"
    return (
        first
        + textwrap.fill(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        ).lstrip()
    )


_HELP = """\
Usage: slurm-health sbatch [options] [script [arguments]]

Submit a batch job as sbatch does; before the script starts, its nodes are
checked.

Options of slurm-health, anywhere before the script:
{options}

Options with a variable can also stand in the script, among its #SBATCH lines:
  #HEALTH --max-requeues=2
The command line wins over the environment, the environment over the script.

Every option of sbatch is passed on as it is; see: sbatch --help
Standard output, standard error and exit code are those of sbatch.
"""
