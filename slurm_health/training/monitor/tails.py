# SPDX-License-Identifier: Apache-2.0
"""What was written to the job's output files since the last look: of much, the end."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_health.training.monitor.srun_output import srun_files

_MOST_BYTES = 64 << 10  # of a file, each time: what is skipped in between says the same
_MOST_FILES = 8  # of a script's sruns
_FIND_S = 60.0  # new files are looked for this often
_SLACK_S = 900.0  # by so much may the clock of a file server be behind ours
_OWN = (Path("/proc/self/fd/1"), Path("/proc/self/fd/2"))  # Slurm opened them for the job


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
            found = os.fstat(file)
            known = (found.st_dev, found.st_ino)
            begin = found.st_size if from_end else self._read.get(known, 0)
            self._read[known] = found.st_size
            if not stat.S_ISREG(found.st_mode) or found.st_size == begin:
                return None
            if found.st_size < begin:  # it was cut since
                begin = 0
            start = max(begin, found.st_size - _MOST_BYTES)
            data = os.pread(file, found.st_size - start, start)
        except OSError:
            return None
        finally:
            os.close(file)
        return Written(f"{known}", data.decode(errors="replace"), start > begin)
