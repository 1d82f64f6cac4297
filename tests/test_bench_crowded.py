# SPDX-License-Identifier: Apache-2.0
"""Nodes whose processors others use, simulated: what is read of that keeps them from blame."""

from __future__ import annotations

import pytest

from benchmarks.crowded import taken_of, tally
from slurm_health.preflight.localize.simulate import Faults

HALF_CROWDED = taken_of(4, (0.8, 0.0, 0.8))
RUNS = 4


@pytest.mark.parametrize(("read", "accused_runs"), [(True, 0), (False, RUNS)])
def test_crowded_nodes_are_accused_only_where_nothing_is_read_of_the_crowd(
    read: bool, accused_runs: int
) -> None:
    assert tally(HALF_CROWDED, Faults(), RUNS, read=read).accused_runs == accused_runs


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_that_computes_slowly_is_found_crowded_or_not(node: str) -> None:
    found = tally(HALF_CROWDED, Faults(compute={node: 3.0}), RUNS, read=True)

    assert (found.found, found.accused_runs) == (RUNS, 0)
