# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sbatch`: a drop-in for sbatch that submits the script inside our launcher.

What sbatch prints and the code it ends with are passed on untouched, and whatever it would refuse
it is given as it is, so that its own words reach the user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slurm_health.errors import SlurmCommandMissing, SlurmError, UsageError
from slurm_health.sbatch import arguments as sbatch_arguments
from slurm_health.sbatch import node_counts
from slurm_health.sbatch import options as health_options
from slurm_health.sbatch import script as batch_script
from slurm_health.sbatch.arguments import CommandLine
from slurm_health.sbatch.node_counts import NodeCounts
from slurm_health.slurm import command
from slurm_health.slurm.client import Client

Run = Callable[[Sequence[str], bytes | None, Mapping[str, str]], int]

_HELP_DEADLINE_S = 10.0
# Options that make sbatch print something, or submit a job without a script of ours.
_NOT_OURS = frozenset({"usage", "version", "autocomplete", "test-only", "external"})
_COMPONENTS = (
    "the components of a heterogeneous job cannot be checked; submit it with plain sbatch,"
    " or with --check=off in front"
)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_sbatch(argv: Sequence[str], stdin: bytes | None, environ: Mapping[str, str]) -> int:
    """Run sbatch with our standard streams and return its exit code, 128+n after signal n.

    `stdin` is what it reads there instead of our own standard input. Signals that would end us
    are passed to it, and we end when it does, so that nothing of ours is left behind.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=None if stdin is None else subprocess.PIPE,
        env=dict(environ),
        close_fds=False,  # --export-file takes the number of an open file descriptor
    )
    previous = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        process.communicate(stdin)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def submit(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: BinaryIO,
    python: str,
    run: Run = run_sbatch,
) -> int:
    """Do what `sbatch` does with these arguments, and have the job's nodes checked first.

    `python` is the interpreter that runs slurm-health on the batch host; `stdin` is read when the
    arguments name no script. Returns the exit code.

    Raises:
        UsageError: a heterogeneous job, or one of our options is misused.
        ConfigError: a setting is unknown or impossible.
        SlurmCommandMissing: there is no sbatch on the PATH.
    """
    line = sbatch_arguments.parse(
        arguments,
        own=health_options.TAKES_VALUE,
        read_help=lambda: _sbatch_help(environ),
    )
    if "help" in line.seen:
        sys.stdout.write(health_options.help_text())
        return 0
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    dry_run = ("dry-run", None) in line.own
    if sbatch is None and not dry_run:
        raise SlurmCommandMissing("sbatch")
    job = _Submission(line=line, environ=environ, stdin=stdin, sbatch=sbatch or "", run=run)
    given = health_options.from_environ(environ) | health_options.from_words(line.own)
    if line.components and given.get("check") != "off":
        raise UsageError(_COMPONENTS)
    if dry_run:
        return job.show(given, python)
    if given.get("check") == "off" or line.seen & _NOT_OURS:
        return job.plain()
    return job.checked(given, python)


class _Refused(Exception):
    """sbatch would refuse this. `script` is what was read of it, if anything."""

    def __init__(self, problem: str, script: bytes | None = None) -> None:
        self.script = script
        super().__init__(problem)


@dataclass(frozen=True, kw_only=True)
class _Submission:
    """One call of sbatch to be."""

    line: CommandLine
    environ: Mapping[str, str]
    stdin: BinaryIO
    sbatch: str
    run: Run

    def plain(self) -> int:
        """Call sbatch without us."""
        return self._call(self.line.plain)

    def checked(self, given: Mapping[str, str], python: str) -> int:
        """Submit the script inside the launcher, or as it is where sbatch would refuse it."""
        try:
            script = self._read()
        except _Refused as refused:
            code = self._unchanged(refused.script)
            if code == 0:
                print(
                    f"slurm-health: {refused}; sbatch took it nevertheless,"
                    " and the job runs UNCHECKED",
                    file=sys.stderr,
                )
            return code
        settings = self._settings(script, given)
        if settings["check"] == "off":
            return self._unchanged(script)
        asked = self._asked(script)
        counts = node_counts.node_counts(asked, settings)
        text = self._render(script, settings, python, counts)
        if counts is None:
            return self._feed(text)
        self._require_room(counts, asked)
        # The last of several wins, and the command line over the script.
        code = self._feed(text, [f"--nodes={counts.request}"])
        if code != 0 and counts.spares:
            print(
                f"slurm-health: sbatch was asked for {counts.request} nodes,"
                f" {counts.spares} of them to spare (--spares)",
                file=sys.stderr,
            )
        return code

    def show(self, given: Mapping[str, str], python: str) -> int:
        """Print the batch script that would be submitted."""
        hidden = ", ".join(f"--{name}" for name in sorted(self.line.seen & _NOT_OURS))
        if hidden:
            raise UsageError(f"--dry-run: with {hidden} there is no batch script to show")
        try:
            script = self._read()
        except _Refused as refused:
            raise UsageError(f"--dry-run: sbatch would refuse this: {refused}") from None
        settings = self._settings(script, given)
        off = settings["check"] == "off"
        counts = None if off else node_counts.node_counts(self._asked(script), settings)
        text = script if off else self._render(script, settings, python, counts)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return 0

    def _call(self, words: Sequence[str], stdin: bytes | None = None) -> int:
        return self.run([self.sbatch, *words], stdin, self.environ)

    def _feed(self, text: bytes, more: Sequence[str] = ()) -> int:
        """Call sbatch with this script: in a file of the same name, or on its standard input."""
        options = list(self.line.options)
        if more and options[-1:] == ["--"]:
            options.pop()  # nothing behind it is read as an option
        options += more
        if self.line.script is None:
            return self._call(options, text)
        with _temporary(self._name(), text) as path:
            return self._call([*options, path, *self.line.arguments])

    def _unchanged(self, script: bytes | None) -> int:
        """Call sbatch without us, with what was read from a source that cannot be read again."""
        path = self._path()
        again = self.line.wrap is not None or (path is not None and path.is_file())
        return self.plain() if script is None or again else self._feed(script)

    def _read(self) -> bytes:
        """Return the script.

        Raises:
            _Refused: sbatch would not take it, or the words that name it.
        """
        line = self.line
        if line.undecided is not None:
            raise _Refused(f"{line.undecided}: not an option of this sbatch, or without its value")
        if line.wrap is not None and line.script is not None:
            raise _Refused(f"{line.script}: a script beside --wrap")
        path = self._path()
        try:
            if line.wrap is not None:
                script = batch_script.wrapped(os.fsencode(line.wrap))
            else:
                script = self.stdin.read() if path is None else path.read_bytes()
        except OSError as err:
            raise _Refused(f"{self._title()}: {err.strerror}") from None
        problem = batch_script.refusal(script)
        if problem is not None:
            raise _Refused(f"{self._title()}: {problem}", script)
        return script

    def _settings(self, script: bytes, given: Mapping[str, str]) -> dict[str, str]:
        lines = batch_script.header(script)
        found = health_options.from_script(lines, self._title())
        settings = found | dict(given)
        settings["check"] = health_options.what_to_check(settings)
        if settings["check"] != "off" and batch_script.has_components(script):
            raise UsageError(f"{self._title()}: {_COMPONENTS}")
        return settings

    def _asked(self, script: bytes) -> dict[str, str]:
        return node_counts.options_asked(self.line, batch_script.header(script), self.environ)

    def _require_room(self, counts: NodeCounts, asked: Mapping[str, str]) -> None:
        """Refuse spares that no partition has; where Slurm cannot be asked, sbatch will say so."""
        if not counts.spares or "clusters" in asked:
            return
        try:
            partitions = Client(self.environ, patience_s=0).partitions()
        except SlurmError:
            return
        node_counts.require_room(counts, asked, partitions)

    def _render(
        self, script: bytes, settings: Mapping[str, str], python: str, counts: NodeCounts | None
    ) -> bytes:
        counted = {"spares", "min-nodes", *health_options.FLAGS}
        kept = [o.name for o in health_options.OPTIONS if o.everywhere and o.name not in counted]
        nodes = (
            {"nodes-wanted": str(counts.wanted), "nodes-needed": str(counts.needed)}
            if counts
            else {}
        )
        return batch_script.render(
            script,
            template=batch_script.read_template(),
            python=python,
            flags=_python_flags(self.environ),
            settings={key: settings[key] for key in kept if key in settings} | nodes,
            name=self._name(),
            is_wrap=self.line.wrap is not None,
        )

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
            here = Path.cwd() / (self.line.chdir or "")
            for directory in ["", *self.environ.get("PATH", "").split(":")]:
                candidate = here / directory / name
                if candidate.exists() and not candidate.is_dir():
                    return candidate
        return Path(name)


@contextlib.contextmanager
def _temporary(name: str, text: bytes) -> Iterator[str]:
    """Provide a file of this base name: sbatch takes the job's name from it."""
    with tempfile.TemporaryDirectory(prefix="slurm-health-") as directory:
        path = Path(directory, name)
        path.write_bytes(text)
        yield str(path)


def _python_flags(environ: Mapping[str, str]) -> list[str]:
    """Return what keeps the job's files and variables from replacing modules of ours.

    -P: a click.py in the working directory. -E: PYTHONHOME and PYTHONPATH, which often belong to
    another Python, unless it is through PYTHONPATH that this package is found.
    """
    package = Path(__file__).parents[1]
    entries = environ.get("PYTHONPATH", "").split(":")
    through_path = any(
        entry and Path(entry).resolve() == package.parent.resolve() for entry in entries
    )
    return ["-P"] if through_path else ["-E", "-P"]


def _sbatch_help(environ: Mapping[str, str]) -> str:
    """Return the text of `sbatch --help`, nothing where it cannot be had."""
    try:
        return command.run(["sbatch", "--help"], environ=environ, deadline_s=_HELP_DEADLINE_S)
    except SlurmError:
        return ""
