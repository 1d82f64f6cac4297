# SPDX-License-Identifier: Apache-2.0
"""The options of `slurm-health sbatch` itself: one table, read from four places.

The command line wins over the environment, the environment over a `#HEALTH` line of the script,
that over the default. Help text, parsing and the names of the variables come from the table.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_health import probe_choice
from slurm_health.core import probe_catalog
from slurm_health.errors import ConfigError

ON_STRAGGLER = ("exclude", "report", "requeue", "drain")
ON_INCONCLUSIVE = ("proceed", "hold", "requeue")
AT_REQUEUE_LIMIT = ("start", "hold", "stop")
PREFIX = "SLURM_HEALTH_"
MAGIC = b"#HEALTH"
FLAGS = ("network-check", "straggler-detection")
_USAGE_WIDTH = 34
_YES, _NO = ("yes", "true", "1", ""), ("no", "false", "0")


def _check(value: str) -> str:
    return value if value == probe_choice.OFF else probe_choice.spelled_out(value, "--check")


def _flag(value: str) -> str:
    if value.lower() not in (*_YES, *_NO):
        raise ValueError(f"expected yes or no, found {value!r}")
    return "yes" if value.lower() in _YES else "no"


def _directory(value: str) -> str:
    if not value:
        raise ValueError("expected a directory, found nothing")
    return os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 - text in, text out


def _interpreter(value: str) -> str:
    if not value:
        raise ValueError("expected a Python interpreter, found nothing")
    if "/" not in value:  # looked up on the job's PATH, which may differ from this one
        return value
    return _directory(value)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return parse


def _positive(value: str) -> str:
    if int(_count(value)) == 0:
        raise ValueError("at least one node is needed")
    return _count(value)


def _count(value: str) -> str:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"expected a whole number from 0 on, found {value!r}")
    return str(int(value))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: `parse` returns the value in its final form or raises ValueError."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str], str] = str
    everywhere: bool = True

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper().replace("-", "_")


OPTIONS = (
    Option(
        name="check",
        metavar="WHAT[,WHAT...]",
        help="quick, standard (default), thorough, off; or probes by name",
        parse=_check,
    ),
    Option(
        name="network-check",
        metavar="",
        help="measure the network in pairs of nodes; alone or beside --check",
        parse=_flag,
    ),
    Option(
        name="straggler-detection",
        metavar="",
        help="train a GPT in pairs of nodes; alone or beside --check",
        parse=_flag,
    ),
    Option(
        name="journal",
        metavar="DIR",
        help="where to keep what was measured, on a filesystem all nodes share",
        parse=_directory,
    ),
    Option(
        name="python",
        metavar="PATH",
        help="interpreter that runs the probes: the one you train with",
        parse=_interpreter,
    ),
    Option(
        name="max-requeues",
        metavar="N",
        help="how often the job may be requeued away from bad nodes (default: 3)",
        parse=_count,
    ),
    Option(
        name="on-straggler",
        metavar="|".join(ON_STRAGGLER),
        help="what a slow node causes (default: exclude)",
        parse=_one_of(*ON_STRAGGLER),
    ),
    Option(
        name="on-inconclusive",
        metavar="|".join(ON_INCONCLUSIVE),
        help="what an undecided node causes (default: proceed)",
        parse=_one_of(*ON_INCONCLUSIVE),
    ),
    Option(
        name="at-requeue-limit",
        metavar="|".join(AT_REQUEUE_LIMIT),
        help="what a job on bad nodes does once it was requeued so often (default: stop)",
        parse=_one_of(*AT_REQUEUE_LIMIT),
    ),
    Option(
        name="spares",
        metavar="K",
        help="allocate K nodes more than --nodes, and run the script on the best",
        parse=_count,
    ),
    Option(
        name="min-nodes",
        metavar="N",
        help="go on with as few as N nodes rather than be requeued",
        parse=_positive,
    ),
    Option(
        name="dry-run",
        metavar="",
        help="print the batch script instead of submitting it",
        everywhere=False,
    ),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_IN_SCRIPT = tuple(option.name for option in OPTIONS if option.everywhere)
TAKES_VALUE = {option.name: bool(option.metavar) for option in OPTIONS}


def from_words(own: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the settings of a command line; the last of several wins.

    Raises:
        ConfigError: a value is impossible.
    """
    return {
        name: _parsed(_BY_NAME[name], value or "", "command line", f"--{name}")
        for name, value in own
    }


def from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of an environment. An empty variable is one that is not set.

    Raises:
        ConfigError: a value is impossible.
    """
    return {
        option.name: _parsed(option, environ[option.variable], "environment", option.variable)
        for option in OPTIONS
        if option.everywhere and environ.get(option.variable)
    }


def from_script(lines: Sequence[bytes], source: str) -> dict[str, str]:
    """Return the settings of the `#HEALTH` lines among the first lines of a script.

    `lines` begin with the script's first line; `source` is what the user calls the script.

    Raises:
        ConfigError: an option is unknown, or a value is missing or impossible.
    """
    settings = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith(MAGIC) and line[len(MAGIC) :][:1].strip() == b"":
            where = f"{source}, line {number}"
            for name, value in _pairs(os.fsdecode(line[len(MAGIC) :]), where):
                settings[name] = _parsed(_BY_NAME[name], value, where, f"--{name}")
    return settings


def _pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
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
        if not equals and TAKES_VALUE[name]:
            if not words:
                raise ConfigError(where, word, f"needs a value: {word}={_BY_NAME[name].metavar}")
            value = words.pop(0)
        yield name, value


def _parsed(option: Option, value: str, source: str, key: str) -> str:
    try:
        return option.parse(value)
    except ConfigError as err:  # about an item of the value
        raise ConfigError(source, key, str(err).removeprefix(f"{err.source}: ")) from None
    except ValueError as err:
        raise ConfigError(source, key, str(err)) from None


def what_to_check(settings: Mapping[str, str]) -> str:
    """Return the whole of what is to be checked, from the option and the flags beside it."""
    named = settings.get("check")
    if named == probe_choice.OFF:
        return named
    flags = [name for name in FLAGS if settings.get(name) == "yes"]
    return ",".join([*([named] if named else []), *flags]) or probe_catalog.DEFAULT


def help_text() -> str:
    """Return what `slurm-health sbatch --help` prints."""
    rows = []
    for option in OPTIONS:
        usage = f"--{option.name}={option.metavar}" if option.metavar else f"--{option.name}"
        if len(usage) >= _USAGE_WIDTH:
            rows.append(f"  {usage}")
            usage = ""
        rows.append(f"  {usage:<{_USAGE_WIDTH}}{option.help}")
        if option.everywhere:
            rows.append(f"  {'':<{_USAGE_WIDTH}}(variable {option.variable})")
    return _HELP.format(options="\n".join(rows))


_HELP = """\
Usage: slurm-health sbatch [options] [script [arguments]]

Submit a batch job as sbatch does; before the script starts, its nodes are checked.

Options of slurm-health, anywhere before the script:
{options}

Options with a variable can also stand in the script, among its #SBATCH lines:
  #HEALTH --max-requeues=2
The command line wins over the environment, the environment over the script.

Every option of sbatch is passed on as it is; see: sbatch --help
Standard output, standard error and exit code are those of sbatch.
"""
