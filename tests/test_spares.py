# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.errors import UsageError
from slurm_health.slurm.sbatch_options import CommandLine, parse
from slurm_health.spares import NodeCounts, node_counts


def command_line(*words: str) -> CommandLine:
    return parse([*words, "train.sh"], own={}, read_help=str)


def test_without_spares_and_range_the_job_asks_for_what_it_asked_for() -> None:
    assert node_counts(command_line("-N4"), [], {}) is None


def test_spares_are_added_to_the_nodes_of_the_command_line() -> None:
    counts = node_counts(command_line("-N", "4"), [b"#SBATCH --nodes=9"], {"spares": "2"})
    assert counts == NodeCounts(request="6", wanted=4, needed=4)


def test_spares_are_added_to_the_nodes_of_the_script() -> None:
    header = [b"#!/bin/sh", b"#SBATCH --time=1 -N 4 # four", b"#HEALTH --spares=1"]
    counts = node_counts(command_line(), header, {"spares": "1"})
    assert counts == NodeCounts(request="5", wanted=4, needed=4)


def test_a_range_makes_do_with_its_lower_end() -> None:
    assert node_counts(command_line("--nodes=3-4"), [], {}) == NodeCounts(
        request="3-4", wanted=4, needed=3
    )


def test_a_range_grows_at_its_upper_end() -> None:
    counts = node_counts(command_line("--nodes=3-4"), [], {"spares": "1"})
    assert counts == NodeCounts(request="3-5", wanted=4, needed=3)


def test_a_minimum_asks_for_no_more_nodes() -> None:
    counts = node_counts(command_line("-N4"), [], {"min-nodes": "3"})
    assert counts == NodeCounts(request="4", wanted=4, needed=3)


def test_a_range_with_a_total_is_left_to_slurm() -> None:
    assert node_counts(command_line("-N3-4", "-n8"), [], {}) is None


@pytest.mark.parametrize("total", ["--ntasks=8", "-n8", "--gpus=8", "--nodelist=n[1-5]", "-wn1"])
def test_spares_are_refused_beside_counts_that_would_no_longer_fit(total: str) -> None:
    with pytest.raises(UsageError, match=r"--spares: does not go with --.*use --"):
        node_counts(command_line("-N4", total), [], {"spares": "1"})


@pytest.mark.parametrize("words", [(), ("--nodes=4k",), ("--nodes=1,3",)])
def test_spares_need_a_number_of_nodes(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="needs the number of nodes"):
        node_counts(command_line(*words), [], {"spares": "1"})


def test_a_minimum_above_the_nodes_asked_for_is_refused() -> None:
    with pytest.raises(UsageError, match="--min-nodes: 5 is more than --nodes=4"):
        node_counts(command_line("-N4"), [], {"min-nodes": "5"})
