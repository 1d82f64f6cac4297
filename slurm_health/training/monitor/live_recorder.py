# SPDX-License-Identifier: Apache-2.0
"""PyTorch's Flight Recorder of ranks without a heartbeat, asked while they run.

Where the environment of a rank names a pipe, torch makes one for it, and leaves a dump when a line
with a 1 comes through it. A thread of its own reads the pipe, whatever the rank's main thread does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.monitor.flight_dumps import Kept, prefixes, read_dump

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # to which torch adds the rank, and `.pipe`
_ASK = b"1\n"
_POLL_S = 0.05


class Recorder(NamedTuple):
    """Where a rank is asked, where it leaves its dump, and of when that was before."""

    rank: int
    pipe: Path
    dump: Path
    before_ns: int


def ask(rank: int, environ: Mapping[str, str], directory: Path) -> Recorder | None:
    """Ask a rank with this environment, in this directory; None where it cannot be asked."""
    prefix = environ.get(PIPE, "")
    dumps = next(prefixes(environ), "")
    if not prefix or not dumps:
        return None
    pipe = directory / f"{prefix}{rank}.pipe"
    dump = directory / f"{dumps}{rank}"
    with contextlib.suppress(OSError):  # as where torch is too old to read it
        before_ns = _written_ns(dump)
        # Where none reads it, opening it fails at once; another file there is not written to.
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if stat.S_ISFIFO(os.fstat(handle).st_mode):
                os.write(handle, _ASK)
                return Recorder(rank, pipe, dump, before_ns)
        finally:
            os.close(handle)
    return None


def answers(
    asked: Mapping[int, Recorder],
    until_s: float,
    kept: Kept,
    monotonic: Callable[[], float] = time.monotonic,
) -> dict[int, FlightRecord]:
    """Return what was dumped by then, by the same keys; a dump may be read while it is written."""
    found: dict[int, FlightRecord] = {}
    while len(found) < len(asked):
        for key, recorder in asked.items():
            if key not in found and (record := _answer(recorder, kept)) is not None:
                found[key] = record
        if len(found) == len(asked) or monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    return found


def _answer(recorder: Recorder, kept: Kept) -> FlightRecord | None:
    with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError):
        if _written_ns(recorder.dump) > recorder.before_ns:
            return read_dump(recorder.dump, recorder.rank, kept)
    return None


def _written_ns(path: Path) -> int:
    """Return when a file of this user was written, 0 where there is none."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return 0
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    return found.st_mtime_ns if ours else 0
