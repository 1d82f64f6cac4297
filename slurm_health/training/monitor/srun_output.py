# SPDX-License-Identifier: Apache-2.0
"""Which files a script had srun write: its patterns, as srun(1) expands them."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

_OPTION = re.compile(r"(?:--(?:output|error)|-[oe])")
_SPECIFIER = re.compile(r"%(\d*)([A-Za-z%])")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_NOT_FILES = {"none", "/dev/null", "/dev/stdout", "/dev/stderr"}
# By srun(1): what the batch script's environment tells of them. The others differ from task to
# task or from step to step.
_TOLD = {
    "A": ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
    "a": ("SLURM_ARRAY_TASK_ID",),
    "j": ("SLURM_JOB_ID",),
    "u": ("SLURM_JOB_USER", "USER"),
    "x": ("SLURM_JOB_NAME",),
}
_ANY = "*"
_NUMBERS = {"n": "[0-9]*", "s": "[0-9]*", "t": "[0-9]*"}
_MOST_BYTES = 1 << 20  # of a script
_MOST_NAMES = 10_000
_MOST_DIGITS = 10  # srun: no width is more


def script_text(path: Path | None) -> str:
    """Return a script, empty where it cannot be read. slurmd keeps it on the node itself."""
    try:
        return path.read_bytes()[:_MOST_BYTES].decode(errors="replace") if path else ""
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
    found: dict[Path, float] = {}
    for pattern in patterns_in(script):
        with contextlib.suppress(OSError, ValueError):  # a directory or a name that cannot be read
            found |= _changed_since(since_s, directory, glob_of(pattern, environ))
    return sorted(found, key=lambda path: -found[path])


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
    found = "".join([*parts, _quoted(pattern[at:])])
    # A name of nothing but what may be anything would take in what is not the job's.
    fixed = re.sub(r"\[0-9\]\*|(?<!\[)\*", "", found.rpartition("/")[2])
    return found if re.search(r"\w", fixed) else ""


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
    told = next((environ[name] for name in _TOLD.get(letter, ()) if name in environ), None)
    if told is None:
        return _ANY
    digits = min(int(width[:3] or 0), _MOST_DIGITS)
    return _quoted(told.zfill(digits) if told.isdigit() else told)


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
            found = path.stat()
            own = found.st_uid == path.lstat().st_uid == os.geteuid()
            if own and stat.S_ISREG(found.st_mode) and found.st_mtime >= since_s:
                changed[path] = found.st_mtime
    return changed
