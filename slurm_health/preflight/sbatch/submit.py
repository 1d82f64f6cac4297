# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sbatch`: a drop-in for sbatch that submits the script inside our launcher.

What sbatch prints and the code it ends with are passed on untouched, and whatever it would refuse
it is given as it is, so that its own words reach the user.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from slurm_health.preflight.chosen_probes import OFF
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.options import (
    DRY_RUN,
    FOR_JOB,
    given_in,
    given_in_environ,
    given_in_script,
    job_spec,
)
from slurm_health.preflight.sbatch import foresight
from slurm_health.preflight.sbatch.arguments import CommandLine, parse
from slurm_health.preflight.sbatch.node_counts import (
    NodeCounts,
    node_counts,
    options_asked,
)
from slurm_health.preflight.sbatch.script import (
    has_components,
    header,
    read_template,
    refusal,
    render,
    wrapped,
)
from slurm_health.records.errors import NoRoom, SlurmCommandMissing, SlurmError, UsageError
from slurm_health.system import private_files
from slurm_health.system.processes import run_in_foreground
from slurm_health.system.slurm import command
from slurm_health.system.slurm.command import Sbatch

_OPTIONS = (*FOR_JOB, DRY_RUN)
_HELP_DEADLINE_S = 10.0
# Options that make sbatch print something, or submit a job without a script of ours.
_NOT_OURS = frozenset({"usage", "version", "autocomplete", "test-only", "external"})
_ALIKE = 0.8  # of 1: a letter or two apart
_COMPONENTS = (
    "the components of a heterogeneous job cannot be checked; submit it with plain sbatch,"
    " or with --check=off in front"
)
_NO_RESTARTS = (
    "--monitor=restart starts a script again as often as --max-restarts allows, and that is 0; add"
    " --max-restarts=K, or have a job that hangs cancelled with --monitor=stop"
)


def submit(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: BinaryIO,
    python: str,
    now_s: float,
    verbose: bool = False,
) -> int:
    """Do what `sbatch` does with these arguments, and have the job's nodes checked first.

    Where an `sbatch` that we have called leads back here, they are passed on as they are.

    `python` is the interpreter that runs slurm-health on the batch host; `stdin` is read when the
    arguments name no script; `now_s` is the time. If `verbose`, the check says in the job's output
    what it waits for. Returns the exit code.

    Raises:
        UsageError: a heterogeneous job, or one of our options is misused.
        ConfigError: a setting is unknown or impossible.
        SlurmCommandMissing: there is no sbatch on the PATH.
        NoRoom: the script cannot be laid down for sbatch.
    """
    sbatch = command.find_sbatch(environ)
    if sbatch.led_back:
        return _call(sbatch, arguments)
    own = {option.name: option.kind is not None for option in _OPTIONS}
    line = parse(arguments, own=own, read_help=lambda: _sbatch_help(sbatch))
    if "help" in line.seen:
        sys.stdout.write(help_text())
        return 0
    dry_run = ("dry-run", None) in line.own
    if sbatch.path is None and not dry_run:
        raise SlurmCommandMissing("sbatch")
    words = [f"--{name}" if text is None else f"--{name}={text}" for name, text in line.own]
    given = given_in_environ(environ) | given_in(words, "command line", _OPTIONS)
    off = given.get("check") == OFF
    if line.components and not off:
        raise UsageError(_COMPONENTS)
    job = _Job(
        line=line,
        given=given,
        environ=environ,
        stdin=stdin,
        sbatch=sbatch,
        now_s=None if dry_run else now_s,
        verbose=verbose,
    )
    if dry_run:
        return job.show(python)
    code = job.plain() if off or line.seen & _NOT_OURS else job.checked(python)
    if code and (near := _nearest(line.plain)):
        _say(f"did you mean {near}?")
    return code


class _Refused(Exception):
    """sbatch would refuse this. `script` is what was read of it, if anything."""

    def __init__(self, problem: str, script: bytes | None = None) -> None:
        self.script = script
        super().__init__(problem)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A script as it is submitted: `text` is the script itself where nothing is to be checked."""

    script: bytes
    text: bytes
    spec: JobSpec = field(default_factory=JobSpec)
    counts: NodeCounts | None = None
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def unchecked(self) -> bool:
        return self.text is self.script


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The job as it was given; `given` are our options in its words and in the environment.

    `now_s` is when it is submitted, None where it is only shown.
    """

    line: CommandLine
    given: Mapping[str, Any]
    environ: Mapping[str, str]
    stdin: BinaryIO
    sbatch: Sbatch
    now_s: float | None
    verbose: bool

    def plain(self) -> int:
        """Call sbatch without us."""
        return _call(self.sbatch, self.line.plain)

    def checked(self, python: str) -> int:
        """Submit the script inside the launcher, or as it is where sbatch would refuse it."""
        try:
            job = self._prepared(python)
        except _Refused as refused:
            code = self._unchanged(refused.script)
            if code == 0:
                _say(
                    f"the job runs UNCHECKED: {refused}, and yet sbatch accepted it; correct that,"
                    " or submit with --check=off"
                )
            return code
        if job.unchecked:
            return self._unchanged(job.script)
        if job.counts is None:
            code = self._feed(job.text)
            return code or self._warned(job, python)
        # The last of several wins, and the command line over the script.
        more = job.counts.options
        if job.spec.keeps_spares:
            more.append("--no-kill")  # Slurm leaves the job alive when it loses a node
        code = self._feed(job.text, more)
        if code == 0:
            return self._warned(job, python)
        if job.counts.spares:
            _say(
                f"sbatch was asked for {job.counts.request} nodes,"
                f" {job.counts.spares} of them spare (--spares)"
            )
        return code

    def _warned(self, job: _Prepared, python: str) -> int:
        """Say what may leave a job unchecked that was submitted; return the code for that."""
        for text in foresight.warnings(
            job.spec,
            job.script,
            self._title(),
            asked=job.asked,
            environ=self.environ,
            python=python,
        ):
            _say(text)
        return 0

    def show(self, python: str) -> int:
        """Print the batch script that would be submitted."""
        hidden = ", ".join(f"--{name}" for name in sorted(self.line.seen & _NOT_OURS))
        if hidden:
            raise UsageError(f"--dry-run: with {hidden} there is no batch script to show")
        try:
            text = self._prepared(python).text
        except _Refused as refused:
            raise UsageError(f"--dry-run: sbatch would refuse this: {refused}") from None
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return 0

    def _feed(self, text: bytes, more: Sequence[str] = ()) -> int:
        """Call sbatch with this script: in a file of the same name, or on its standard input."""
        options = list(self.line.options)
        if more and options[-1:] == ["--"]:
            options.pop()  # nothing behind it is read as an option
        options += more
        if self.line.script is None:
            return _call(self.sbatch, options, text)
        # sbatch takes the job's name from the file's.
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(private_files.temporary(self._name(), text))
            except OSError as err:
                raise NoRoom(self._title(), err.strerror or str(err)) from err
            return _call(self.sbatch, [*options, str(path), *self.line.arguments])

    def _unchanged(self, script: bytes | None) -> int:
        """Call sbatch without us, with what was read from a source that cannot be read again."""
        path = self._path()
        again = self.line.wrap is not None or (
            path is not None and os.access(path, os.F_OK) and path.is_file()
        )
        return self.plain() if script is None or again else self._feed(script)

    def _prepared(self, python: str) -> _Prepared:
        """Return the script as it is to be submitted.

        Raises:
            _Refused: sbatch would not take it, or the words that name it.
            UsageError: it is a heterogeneous job, or what is asked for does not go together.
            ConfigError: one of its `#HEALTH` lines cannot be used.
        """
        script = self._read()
        lines = header(script)
        spec = job_spec(given_in_script(lines, self._title()) | dict(self.given))
        if spec.check == OFF:
            return _Prepared(script=script, text=script)
        if has_components(script):
            raise UsageError(f"{self._title()}: {_COMPONENTS}")
        asked = options_asked(self.line, lines, self.environ, lambda: _sbatch_help(self.sbatch))
        counts = node_counts(asked, spec.spares)
        spec = self._completed(spec, counts)
        text = render(
            script,
            template=read_template(),
            python=python,
            flags=python_flags(self.environ),
            spec=spec,
            name=self._name(),
            is_wrap=self.line.wrap is not None,
        )
        return _Prepared(script=script, text=text, spec=spec, counts=counts, asked=asked)

    def _completed(self, spec: JobSpec, counts: NodeCounts | None) -> JobSpec:
        """Return what is asked for, with what only the submission knows.

        Raises:
            UsageError: a script that hangs is to be restarted, and no restarts are allowed.
        """
        if spec.monitor is OnHang.RESTART and not spec.max_restarts:
            raise UsageError(_NO_RESTARTS)
        return msgspec.structs.replace(
            spec,
            submit_time_s=None if self.now_s is None else int(self.now_s),
            verbose=self.verbose,
            nodes_wanted=counts and counts.wanted,
            nodes_needed=counts and counts.needed,
        )

    def _read(self) -> bytes:
        """Return the script.

        Raises:
            _Refused: sbatch would not take it, or the words that name it.
        """
        line = self.line
        if line.undecided is not None:
            raise _Refused(
                f"{line.undecided}: not an option of this sbatch, or its value is missing"
            )
        if line.wrap is not None and line.script is not None:
            raise _Refused(f"{line.script}: --wrap takes no script beside it")
        path = self._path()
        try:
            if line.wrap is not None:
                script = wrapped(os.fsencode(line.wrap))
            else:
                script = self.stdin.read() if path is None else path.read_bytes()
        except OSError as err:
            raise _Refused(f"{self._title()}: {err.strerror}") from None
        problem = refusal(script)
        if problem is not None:
            raise _Refused(f"{self._title()}: {problem}", script)
        return script

    def _title(self) -> str:
        """What the user calls the script."""
        return self.line.script or ("--wrap" if self.line.wrap is not None else "standard input")

    def _name(self) -> str:
        if self.line.script is not None:
            return os.path.basename(self.line.script)  # noqa: PTH119 - as sbatch: "" after a slash
        return "wrap" if self.line.wrap is not None else "stdin"

    def _path(self) -> Path | None:
        """Return the script's file as sbatch finds it: in --chdir, then on PATH, then as named."""
        name = self.line.script
        if name is None:
            return None
        if name[:1] not in {".", "/"}:
            here = Path.cwd() / self.line.values.get("chdir", "")
            for directory in ["", *self.environ.get("PATH", "").split(":")]:
                candidate = here / directory / name
                # A directory that is closed to the user has none for sbatch either.
                if os.access(candidate, os.R_OK) and not candidate.is_dir():
                    return candidate
        return Path(name)


def _nearest(words: Sequence[str]) -> str:
    """Return the option of ours that sbatch was given misspelt, empty if there is none."""
    import difflib  # not free, and few options are mistaken

    ours = [f"--{option.name}" for option in _OPTIONS]
    for word in words:
        near = difflib.get_close_matches(word.partition("=")[0], ours, n=1, cutoff=_ALIKE)
        if word.startswith("--") and near:
            return near[0]
    return ""


def help_text() -> str:
    """Return what `slurm-health sbatch --help` prints."""
    formatter = click.HelpFormatter(width=_WIDTH)
    with formatter.indentation():
        formatter.write_dl(
            [
                (f"--{option.name}" + (f"={option.metavar}" if option.metavar else ""), option.help)
                for option in _OPTIONS
            ],
            col_max=24,
        )
    return _HELP.format(options=formatter.getvalue().rstrip())


_WIDTH = 79  # of a terminal with 80 columns
_HELP = """\
Usage: slurm-health sbatch [options] [script [arguments]]

Submit a batch job as sbatch does; its nodes are checked before it starts.

Options of slurm-health, anywhere before the script:
{options}

All but --dry-run may stand in the environment (SLURM_HEALTH_MAX_REQUEUES=2) or
among the #SBATCH lines (#HEALTH --max-requeues=2); the command line wins, then
the environment. All other options (sbatch --help), output and exit code are
those of sbatch.
"""


def _call(sbatch: Sbatch, words: Sequence[str], stdin: bytes | None = None) -> int:
    if sbatch.path is None:
        raise SlurmCommandMissing("Slurm's own sbatch")
    return run_in_foreground([sbatch.path, *words], environ=sbatch.environ, stdin=stdin)


def _say(text: str) -> None:
    print(f"slurm-health: {text}", file=sys.stderr)


def python_flags(environ: Mapping[str, str]) -> list[str]:
    """Return what keeps the job's files and variables from replacing modules of ours.

    -P: a click.py in the working directory. -E: PYTHONHOME and PYTHONPATH, which often belong to
    another Python, unless it is through PYTHONPATH that this package is found.
    """
    package = Path(__file__).parents[2]
    entries = environ.get("PYTHONPATH", "").split(":")
    through_path = any(
        entry and Path(entry).resolve() == package.parent.resolve() for entry in entries
    )
    return ["-P"] if through_path else ["-E", "-P"]


def _sbatch_help(sbatch: Sbatch) -> str:
    """Return the text of `sbatch --help`, nothing where it cannot be had."""
    argv = [sbatch.path or "sbatch", "--help"]
    try:
        return command.run(argv, environ=sbatch.environ, deadline_s=_HELP_DEADLINE_S)
    except SlurmError:
        return ""
