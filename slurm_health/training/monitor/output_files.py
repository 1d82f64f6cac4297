# SPDX-License-Identifier: Apache-2.0
"""The files of a job's output, also those of the sruns in its script, and their new text.

Patterns are expanded as in srun(1). Of long new text, only the end is read.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_MOST_BYTES = 64 << 10  # of a file at a time: skipped lines are repetitive
_MOST_FILES = 8  # of a script's sruns
_FIND_S = 60.0  # between two searches for new files
_SLACK_S = 900.0  # the clock of a file server may be behind ours
_OWN = (Path("/proc/self/fd/1"), Path("/proc/self/fd/2"))  # Slurm opened them for the job
_OPTION = re.compile(r"(?:--(?:output|error)|-[oe])")
_SPECIFIER = re.compile(r"%(\d*)([A-Za-z%])")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NOT_FILES = {"none", "/dev/null", "/dev/stdout", "/dev/stderr"}
# The specifiers of srun(1) in the batch script's environment. The others differ between tasks or
# steps.
_BY_VARIABLE = {
    "A": ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
    "a": ("SLURM_ARRAY_TASK_ID",),
    "j": ("SLURM_JOB_ID",),
    "u": ("SLURM_JOB_USER", "USER"),
    "x": ("SLURM_JOB_NAME",),
}
_ANY = "*"
_NUMBERS = {"n": "[0-9]*", "s": "[0-9]*", "t": "[0-9]*"}
_MOST_SCRIPT_BYTES = 1 << 20  # of a script
_MOST_NAMES = 10_000
_MOST_DIGITS = 10  # srun: no width is more


class Written(NamedTuple):
    """The end of a file's new text; `torn`: there was more before it."""

    file: str
    text: str
    torn: bool


class Tails:
    """Follows the files of the job's own output and error, and those of its sruns."""

    def __init__(
        self,
        script: str,
        directory: Path,
        environ: Mapping[str, str],
        own: tuple[Path, ...] = _OWN,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._script, self._directory, self._environ = script, directory, environ
        self._since_s = time.time() - _SLACK_S
        self._own = own
        self._monotonic = monotonic
        self._read: dict[tuple[int, int], int] = {}
        self._by_name: dict[str, Path] = {}
        self._look_again_s = -_FIND_S
        self._theirs: list[Path] = []
        for path in self._paths():  # their text is of an earlier start
            self._take(path, from_end=True)

    def written(self) -> Iterator[Written]:
        """Yield the text since the last call."""
        for path in self._paths():
            written = self._take(path)
            if written is not None:
                yield written

    def backwards(self, file: str) -> Iterator[str]:
        """Yield the lines of a file, the latest first."""
        torn = b""
        with contextlib.suppress(OSError), self._by_name[file].open("rb") as text:
            at = text.seek(0, os.SEEK_END)
            while at > 0 and (size := min(at, _MOST_BYTES)):
                at -= size
                torn, *lines = re.split(rb"[\r\n]+", os.pread(text.fileno(), size, at) + torn)
                yield from (line.decode(errors="replace") for line in reversed(lines))
        yield torn.decode(errors="replace")

    def _paths(self) -> Iterator[Path]:
        now_s = self._monotonic()
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + _FIND_S
            self._theirs = srun_files(
                self._script, self._directory, self._environ, since_s=self._since_s
            )[:_MOST_FILES]
        yield from (*self._own, *self._theirs)

    def _take(self, path: Path, *, from_end: bool = False) -> Written | None:
        try:
            if not path.is_file():  # opening a FIFO waits for its other end
                return None
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(file)
            known = (status.st_dev, status.st_ino)
            begin = status.st_size if from_end else self._read.get(known, 0)
            self._read[known] = status.st_size
            self._by_name[f"{known}"] = path
            if not stat.S_ISREG(status.st_mode) or status.st_size == begin:
                return None
            if status.st_size < begin:  # it was cut since
                begin = 0
            start = max(begin, status.st_size - _MOST_BYTES)
            data = os.pread(file, status.st_size - start, start)
        except OSError:
            return None
        finally:
            os.close(file)
        return Written(f"{known}", data.decode(errors="replace"), start > begin)


def script_text(path: Path | None) -> str:
    """Return a script, empty if it cannot be read. slurmd keeps it on the node itself."""
    try:
        return path.read_bytes()[:_MOST_SCRIPT_BYTES].decode(errors="replace") if path else ""
    except OSError:
        return ""


def srun_files(
    script: str, directory: Path, environ: Mapping[str, str], *, since_s: float
) -> list[Path]:
    """Return the files of a script's sruns with new text since then, the latest first.

    Other users can write files in directories such as /tmp, which are no output of the job.

    Args:
        script: its text.
        directory: its working directory.
        environ: its environment.
        since_s: seconds since the epoch.
    """
    files: dict[Path, float] = {}
    for pattern in patterns_in(script):
        with contextlib.suppress(OSError, ValueError):  # a directory or a name that cannot be read
            name = glob_of(pattern, environ)
            whole = str(Path(glob.escape(str(directory))) / name)
            names = Path("/").glob(whole.lstrip("/")) if name else ()
            for path in itertools.islice(names, _MOST_NAMES):
                with contextlib.suppress(OSError):  # it is removed meanwhile
                    status = path.stat()
                    own = status.st_uid == path.lstat().st_uid == os.geteuid()
                    if own and stat.S_ISREG(status.st_mode) and status.st_mtime >= since_s:
                        files[path] = status.st_mtime
    return sorted(files, key=lambda path: -files[path])


def patterns_in(script: str) -> Iterator[str]:
    """Yield the literal values of --output and --error of the srun commands in a script."""
    for line in script.replace("\\\n", " ").splitlines():
        if "srun" not in line or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that ends on another line
            words = line.split()
        for at, word in enumerate(words):
            option, equals, value = word.partition("=")
            if equals and option in {"--output", "--error"}:
                yield value
            elif _OPTION.fullmatch(word) and at + 1 < len(words):
                yield words[at + 1]
            elif re.match(r"-[oe][^-=]", word):
                yield word[2:]


def glob_of(pattern: str, environ: Mapping[str, str]) -> str:
    """Return a glob for a file's name; empty if it is no file of the job's own.

    Variables of the script itself are unknown here, and match anything.
    """
    if not pattern or pattern in _NOT_FILES or pattern.startswith("/dev/"):
        return ""
    if "\\" in pattern:  # srun: then nothing in it is expanded
        return _quoted(pattern.replace("\\", ""))
    parts = []
    at = 0
    for match in re.finditer(f"{_SPECIFIER.pattern}|{_VARIABLE.pattern}", pattern):
        parts.append(_quoted(pattern[at : match.start()]))
        parts.append(_expanded(match, environ))
        at = match.end()
    name = "".join([*parts, _quoted(pattern[at:])])
    # A name of wildcards alone would match files of other jobs.
    fixed = re.sub(r"\[0-9\]\*|(?<!\[)\*", "", name.rpartition("/")[2])
    return name if re.search(r"\w", fixed) else ""


def _expanded(match: re.Match[str], environ: Mapping[str, str]) -> str:
    width, letter, braced, bare = match.groups()
    if letter is None:
        return _quoted(environ[name]) if (name := braced or bare) in environ else _ANY
    if letter == "%":
        return "%"
    if letter == "J":
        return f"{environ.get('SLURM_JOB_ID') or _ANY}.*"
    if letter in _NUMBERS:
        return _NUMBERS[letter]
    value = next((environ[name] for name in _BY_VARIABLE.get(letter, ()) if name in environ), None)
    if value is None:
        return _ANY
    digits = min(int(width[:3] or 0), _MOST_DIGITS)
    return _quoted(value.zfill(digits) if value.isdigit() else value)


def _quoted(text: str) -> str:
    return re.sub(r"[*?\[]", r"[\g<0>]", text)
