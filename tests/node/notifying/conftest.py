# SPDX-License-Identifier: Apache-2.0
"""Nodes with hooks, and somebody who listens, for the tests beside this file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hooked_node import node, rack, shared, slurm
from tests.support.listener import Listener, listening

__all__ = ["node", "rack", "shared", "slurm"]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "listener") as found:
        yield found


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    """Waits for a condition, as long as a busy machine may need."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + 55
        while not condition():
            assert time.monotonic() < give_up_s, what
            time.sleep(0.05)

    return wait
