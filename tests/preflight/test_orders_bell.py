# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.orders import Bell, Ringers, ring_all


@pytest.fixture
def ends() -> Iterator[tuple[int, int, int, int]]:
    """The agent's input, the master's end of it, the master's input, the agent's end of that."""
    descriptors = (*os.pipe(), *os.pipe())
    yield descriptors
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            continue


Ends = tuple[int, int, int, int]


def test_an_agent_hears_each_ring_once(ends: Ends) -> None:
    agent_in, master_out, _, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    assert not bell.heard()
    ring_all(master_out)
    ring_all(master_out)
    assert bell.heard()
    assert not bell.heard()


@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_rings_that_come_in_pieces_are_heard_whole(cuts: list[int]) -> None:
    data = b"x\nslurm-health: news of n1\nnonsense\nslurm-health: news of n22\n"
    ringers, rung = Ringers(), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        rung += ringers.rung(data[start:end])
    assert rung == ["n1", "n22"]


@given(data=st.binary(max_size=300))
def test_whatever_an_agent_prints_is_no_error(data: bytes) -> None:
    ringers = Ringers()
    ringers.rung(data)
    ringers.rung(b"\n")
    assert ringers.rung(b"slurm-health: news of n1\n") == ["n1"]


def test_nobody_waits_where_a_pipe_is_full(ends: Ends) -> None:
    agent_in, master_out, _, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    os.set_blocking(master_out, False)
    for _ in range(20_000):  # more than a pipe holds
        bell.ring()
        ring_all(master_out)
    assert bell.heard()


def test_a_bell_whose_other_end_is_gone_is_silent(ends: Ends) -> None:
    agent_in, master_out, master_in, agent_out = ends
    bell = Bell("n1", agent_in, agent_out)
    os.close(master_out)
    os.close(master_in)
    bell.ring()
    assert not bell.heard()
    assert bell.descriptor is None


def test_a_file_or_nothing_is_no_bell(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as file:
        bell = Bell("n1", file.fileno(), file.fileno())
        bell.ring()
        assert (bell.descriptor, bell.heard()) == (None, False)
        assert file.tell() == 0
    assert Bell("n1", 9999, 9999).descriptor is None
