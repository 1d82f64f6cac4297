# SPDX-License-Identifier: Apache-2.0
"""Whose word may have this node tested now: one at a time, and each user's only so often.

A test takes processors or GPUs, and a job of one second with a forged journal would be enough to
have root start one beside the jobs of others.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

from slurm_health.node.rules.accusations import Tested, with_test
from slurm_health.node.rules.settings import Accusations
from slurm_health.records.decoding import from_json

_FILE = "tested.json"


@contextlib.contextmanager
def turn(state: Path, uid: int, now_s: float, settings: Accusations) -> Iterator[str]:
    """Hold the turn for a test of this node; yield why there is none, empty when there is."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Unbuffered: what there is no room for fails where it is written.
        file = (state / _FILE).open("a+b", buffering=0)
    except OSError as err:
        yield f"tests cannot be counted in {state}: {err.strerror}"
        return
    with file:
        yield _take(file, uid, now_s, settings)


def _take(file: FileIO, uid: int, now_s: float, settings: Accusations) -> str:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another test of this node is running"
    file.seek(0)
    tested = with_test(_read(file.read()), uid, now_s, settings)
    if tested is None:
        times = settings.tests_per_user_hour
        return f"jobs of user {uid} have had it tested {times} times within the hour"
    data = msgspec.json.encode(tested)
    try:
        file.truncate(0)
        written = file.write(data)
    except OSError as err:
        return f"tests cannot be counted: {err.strerror}"
    return "" if written == len(data) else "tests cannot be counted: there is no room"


def _read(data: bytes) -> Tested:
    try:
        return from_json(data, Tested)
    except msgspec.DecodeError:
        return {}
