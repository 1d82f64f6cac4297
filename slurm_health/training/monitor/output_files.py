# SPDX-License-Identifier: Apache-2.0
"""The files of a job's output: which a script had srun write, and what is new in them.

Patterns are expanded as srun(1) says. Of much that is new since the last look, the end is read.
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

_MOST_BYTES = 64 << 10  # of a file, each time: what is skipped in between says the same
_MOST_FILES = 8  # of a script's sruns
_FIND_S = 60.0  # new files are looked for this often
_SLACK_S = 900.0  # by so much may the clock of a file server be behind ours
_OWN = (Path("/proc/self/fd/1"), Path("/proc/self/fd/2"))  # Slurm opened them for the job
_OPTION = re.compile(r"(?:--(?:output|error)|-[oe])")
_SPECIFIER = re.compile(r"%(\d*)([A-Za-z%])")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NOT_FILES = {"none", "/dev/null", "/dev/stdout", "/dev/stderr"}
# By srun(1): what the batch script's environment has of them. The others differ from task to
# task or from step to step.
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
    """The end of what was written to a file; `torn`: there was more before it."""

    file: str
    text: str
    torn: bool


class Tails:
    """Follows the files of the job's own output and error, and those that its sruns write."""

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
        for path in self._paths():  # what stands there is of an earlier start
            self._take(path, from_end=True)

    def written(self) -> Iterator[Written]:
        """Yield what was written since the last time."""
        for path in self._paths():
            written = self._take(path)
            if written is not None:
                yield written

    def backwards(self, file: str) -> Iterator[str]:
        """Yield the lines of a file, the latest first, as far back as is read."""
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
    """Return a script, empty where it cannot be read. slurmd keeps it on the node itself."""
    try:
        return path.read_bytes()[:_MOST_SCRIPT_BYTES].decode(errors="replace") if path else ""
    except OSError:
        return ""


def srun_files(
    script: str, directory: Path, environ: Mapping[str, str], *, since_s: float
) -> list[Path]:
    """Return the files of a script's sruns that were written to since then, the latest first.

    Args:
        script: its text.
        directory: where it was started.
        environ: with which environment.
        since_s: seconds since the epoch.
    """
    files: dict[Path, float] = {}
    for pattern in patterns_in(script):
        with contextlib.suppress(OSError, ValueError):  # a directory or a name that cannot be read
            files |= _changed_since(since_s, directory, glob_of(pattern, environ))
    return sorted(files, key=lambda path: -files[path])


def patterns_in(script: str) -> Iterator[str]:
    """Yield the values of --output and --error of the srun commands in a script, as they stand."""
    for line in script.replace("\\\n", " ").splitlines():
        if "srun" not in line or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation that ends on another line
            words = line.split()
        yield from _values(words)


def _values(words: list[str]) -> Iterator[str]:
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if equals and option in {"--output", "--error"}:
            yield value
        elif _OPTION.fullmatch(word) and at + 1 < len(words):
            yield words[at + 1]
        elif re.match(r"-[oe][^-=]", word):
            yield word[2:]


def glob_of(pattern: str, environ: Mapping[str, str]) -> str:
    """Return what a file's name is like, for glob; empty where that is no file of the job's own.

    What the script alone knows, as a variable of its own, stands for anything.
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
    # A name of nothing but what may be anything would take in what is not the job's.
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


def _changed_since(since_s: float, directory: Path, pattern: str) -> dict[Path, float]:
    """Return this user's files with such a name that were written to since then, and when.

    Where others can write, as in /tmp, they can lay what no srun of the job has written.
    """
    whole = str(Path(glob.escape(str(directory))) / pattern)
    names = Path("/").glob(whole.lstrip("/")) if pattern else ()
    changed = {}
    for path in itertools.islice(names, _MOST_NAMES):
        with contextlib.suppress(OSError):  # it is gone again
            status = path.stat()
            own = status.st_uid == path.lstat().st_uid == os.geteuid()
            if own and stat.S_ISREG(status.st_mode) and status.st_mtime >= since_s:
                changed[path] = status.st_mtime
    return changed
