# SPDX-License-Identifier: Apache-2.0
"""Every option that a job can be given, for all commands, variables and `#HEALTH` lines.

The commands `check`, `sbatch` and `run`, the variables `SLURM_HEALTH_*` and the `#HEALTH` lines of
a batch script are read by the same click options. The command line wins over the environment, the
environment over the script, the script over the site.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from slurm_health.preflight.chosen_probes import OFF, spelled_out, what_to_check
from slurm_health.preflight.decide import policy
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.records.errors import ConfigError, ExitCode

MAGIC = b"#HEALTH"
PREFIX = "SLURM_HEALTH_"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """How a value is written: `metavar` for a usage line; `read` raises ValueError."""

    metavar: str
    read: Callable[[str], str | int]


def _read_probes(text: str) -> str:
    try:
        return text if text == OFF else spelled_out(text, "--check")
    except ConfigError as err:
        raise ValueError(str(err).removeprefix("--check: ")) from None


def _path_of(what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not text:
            raise ValueError(f"expected {what}, not an empty text")
        if not text.isascii() and os.fsencode(text).decode(errors="ignore") != text:
            raise ValueError(f"{text!a} is not UTF-8, which {what} has to be here")
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - text in, text out

    return read


def _read_directories(text: str) -> str:
    return ",".join(_path_of("a directory")(part.strip()) for part in text.split(","))


def _read_interpreter(text: str) -> str:
    # A bare name is looked up on the job's PATH, which may differ from this one.
    return text if text and "/" not in text else _path_of("a Python interpreter")(text)


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a whole number, 0 or more, not {text!r}")
    return int(text)


def _choice(choices: type[Enum]) -> Kind:
    values = [choice.value for choice in choices]

    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}")
        return text

    return Kind("|".join(values), read)


_COUNT = Kind("N", _read_count)
_FILE = Kind("FILE", _path_of("a file"))


class JobOption:
    """One option; `default` says in words what holds if it is not given."""

    def __init__(self, name: str, kind: Kind | None, text: str, *, default: object = None) -> None:
        self.name = name
        self.kind = kind  # None for a flag
        shown = default.value if isinstance(default, Enum) else default
        self.help = text if shown is None else f"{text.removesuffix('.')} [default: {shown}]."

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.replace("-", "_").upper()

    @property
    def metavar(self) -> str:
        """How its value is written in a usage line, empty for a flag."""
        return "" if self.kind is None else self.kind.metavar

    def of_click(self) -> click.Option:
        """Return it for a command of click."""
        return click.Option([f"--{self.name}"], **self._attributes())

    def decorate(self, command: _F) -> _F:
        """Give it to a command of click."""
        return click.option(f"--{self.name}", **self._attributes())(command)

    def _attributes(self) -> dict[str, Any]:
        if self.kind is None:
            return {"is_flag": True, "help": self.help}
        return {"metavar": self.metavar, "callback": self._callback, "help": self.help}

    def _callback(
        self, context: click.Context, parameter: click.Parameter, text: str | None
    ) -> str | int | None:
        assert self.kind is not None
        try:
            return None if text is None else self.kind.read(text)
        except ValueError as err:
            raise click.BadParameter(str(err), ctx=context, param=parameter) from None


_DEFAULT = JobSpec()
CHECK = JobOption(
    "check",
    Kind("WHAT[,WHAT...]", _read_probes),
    "What to measure: auto, quick, standard, thorough, light, off (sbatch), names of probes, or the"
    " path of a program.",
    default=_DEFAULT.check,
)
JOURNAL = JobOption(
    "journal",
    Kind("DIR", _path_of("a directory")),
    "Where journals go, shared by all nodes.",
    default="the site's, else ~/.slurm-health/journal",
)
PYTHON = JobOption(
    "python",
    Kind("PATH", _read_interpreter),
    "The interpreter that the job trains with.",
    default="python3, if it has torch",
)
_SETUP = JobOption(
    "setup",
    _FILE,
    "A file that bash sources before the probes start.",
)
_PATHS = JobOption(
    "paths",
    Kind("DIR[,DIR...]", _read_directories),
    "More directories for the test of storage.",
)
_NETWORK_CHECK = JobOption(
    "network-check",
    None,
    "Measure the network, in pairs of nodes.",
)
_STRAGGLER_DETECTION = JobOption(
    "straggler-detection",
    None,
    "Train a GPT, in pairs of nodes.",
)
_ON_STRAGGLER = JobOption(
    "on-straggler",
    _choice(policy.OnStraggler),
    "Leave a slow node if that costs seconds, or only report it.",
    default=_DEFAULT.on_straggler,
)
_MAX_REQUEUES = JobOption(
    "max-requeues",
    _COUNT,
    "Requeue the job for bad nodes N times at most.",
    default=_DEFAULT.max_requeues,
)
_MONITOR = JobOption(
    "monitor",
    _choice(policy.OnHang),
    "Report hangs and slow ranks; stop a job that hangs, or restart its script.",
    default=_DEFAULT.monitor,
)
_HEARTBEAT = JobOption(
    "heartbeat",
    _choice(policy.Heartbeat),
    "Steps of PyTorch's optimizers are a heartbeat (sets PYTHONPATH).",
    default=_DEFAULT.heartbeat,
)
# In the order in which people need them.
FOR_CHECK = (
    CHECK,
    _NETWORK_CHECK,
    _STRAGGLER_DETECTION,
    _ON_STRAGGLER,
    _MAX_REQUEUES,
    _PATHS,
    PYTHON,
    _SETUP,
    JOURNAL,
)
FOR_JOB = (
    *FOR_CHECK[:3],
    JobOption(
        "spares",
        Kind("K", _read_count),
        "Allocate K more nodes; run the script on the best.",
    ),
    JobOption(
        "max-restarts",
        _COUNT,
        "Start a failed script again N times at most, in its job, without nodes at fault.",
        default=_DEFAULT.max_restarts,
    ),
    _MONITOR,
    *FOR_CHECK[3:5],
    JobOption(
        "on-unchecked",
        _choice(policy.OnUnchecked),
        f"If nodes cannot be checked, run, or stop with exit code {ExitCode.UNAVAILABLE}.",
        default=_DEFAULT.on_unchecked,
    ),
    _HEARTBEAT,
    JobOption(
        "flight-recorder",
        _choice(policy.FlightRecorder),
        "PyTorch records collectives, for a post-mortem (sets variables).",
        default=_DEFAULT.flight_recorder,
    ),
    *FOR_CHECK[5:],
)
DRY_RUN = JobOption("dry-run", None, "Print the batch script without submitting it.")
FOR_RUN = (
    _NETWORK_CHECK,
    _STRAGGLER_DETECTION,
    JobOption(
        "exclude-straggler",
        None,
        "Check, and treat a slow node like a faulty one; else it is named and trains.",
    ),
    JOURNAL,
    PYTHON,
    _SETUP,
    _MONITOR,
    _HEARTBEAT,
)


def given_in(
    words: Sequence[str], source: str, options: Iterable[JobOption] = FOR_JOB
) -> dict[str, Any]:
    """Return what some words say, by the names of Python variables.

    `words` are options as on a command line; `source` is where they stand, for errors.

    Raises:
        ConfigError: one is unknown, or its value is missing or impossible.
    """
    known = {f"--{option.name}": option for option in options}
    command = click.Command(
        "", params=[option.of_click() for option in known.values()], add_help_option=False
    )
    try:
        with command.make_context("", list(words)) as context:
            return {
                name: value
                for name, value in context.params.items()
                if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            }
    except click.NoSuchOption as err:
        raise ConfigError(source, err.option_name, "unknown option", valid=known) from None
    except click.BadOptionUsage as err:
        metavar = known[err.option_name].metavar
        problem = f"needs a value: {err.option_name}={metavar}" if metavar else "takes no value"
        raise ConfigError(source, err.option_name, problem) from None
    except click.BadParameter as err:
        name = err.param.opts[0] if err.param is not None else ""
        raise ConfigError(source, name, err.message) from None
    except click.UsageError as err:
        word = next((word for word in words if not word.startswith("--")), words[0])
        name = word.partition("=")[0]
        raise ConfigError(source, name, "unknown option", valid=known) from err


def given_in_script(lines: Sequence[bytes], title: str) -> dict[str, Any]:
    """Return what the `#HEALTH` lines among the first lines of a script say.

    `lines` begin with the script's first line; `title` is what the user calls the script.

    Raises:
        ConfigError: an option is unknown, or a value is missing or impossible.
    """
    given: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        if not line.startswith(MAGIC) or line[len(MAGIC) :][:1].strip():
            continue
        where = f"{title}, line {number}"
        try:
            words = shlex.split(os.fsdecode(line[len(MAGIC) :]), comments=True)
        except ValueError as err:
            raise ConfigError(where, "#HEALTH", f"cannot be read: {err}".lower()) from None
        given |= given_in(words, where)
    return given


def given_in_environ(environ: Mapping[str, str], *options: JobOption) -> dict[str, Any]:
    """Return what the variables of an environment say about these options, or about all.

    An empty variable is one that is not set.

    Raises:
        ConfigError: a value is impossible.
    """
    given: dict[str, Any] = {}
    for option in options or FOR_JOB:
        text = environ.get(option.variable, "")
        if not text:
            continue
        try:
            if option.kind is not None:
                given |= given_in([f"--{option.name}={text}"], "environment")
            elif click.BOOL.convert(text, None, None):
                given |= given_in([f"--{option.name}"], "environment")
        except ConfigError as err:
            problem = str(err).partition(f"--{option.name}: ")[2]
            raise ConfigError("environment", option.variable, problem) from None
        except click.BadParameter:
            problem = f"expected yes or no, not {text!r}"
            raise ConfigError("environment", option.variable, problem) from None
    return given


def job_spec(given: Mapping[str, Any]) -> JobSpec:
    """Return what was asked for, from what was given, by the names of Python variables."""
    fields = {field for field in JobSpec.__struct_fields__ if given.get(field) is not None}
    chosen = {name: given[name] for name in fields} | {"check": what_to_check(given)}
    return msgspec.convert(chosen, JobSpec)


def with_options(*options: JobOption) -> Callable[[_F], _F]:
    """Give a command of click some options."""

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option.decorate(command)
        return command

    return add
