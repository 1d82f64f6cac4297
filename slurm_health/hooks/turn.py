# SPDX-License-Identifier: Apache-2.0
"""Whose word may have this node tested now: one at a time, and each user's only so often.

A test takes processors or GPUs, and a job of one second with a forged journal would be enough to
have root start one beside the jobs of others.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from slurm_health.core.node.accusations import Tested, with_test
from slurm_health.core.node.settings import Accusations

_FILE = "tested.json"


@contextlib.contextmanager
def turn(state: Path, uid: int, now_s: float, settings: Accusations) -> Iterator[str]:
    """Hold the turn for a test of this node; yield why there is none, empty when there is."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (state / _FILE).open("a+b")
    except OSError as err:
        yield f"tests cannot be counted in {state}: {err.strerror}"
        return
    with file:
        yield _take(file, uid, now_s, settings)


def _take(file: BinaryIO, uid: int, now_s: float, settings: Accusations) -> str:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another test of this node is running"
    file.seek(0)
    tested = with_test(_read(file.read()), uid, now_s, settings)
    if tested is None:
        times = settings.tests_per_user_hour
        return f"jobs of user {uid} have had it tested {times} times within the hour"
    file.truncate(0)
    file.write(msgspec.json.encode(tested))
    file.flush()
    return ""


def _read(data: bytes) -> Tested:
    try:
        return msgspec.json.decode(data, type=Tested)
    except msgspec.DecodeError:
        return {}
