# SPDX-License-Identifier: Apache-2.0
"""Where a training hangs whose ranks say nothing."""

from __future__ import annotations

import pytest

from slurm_health.training.diagnosis.seen import BrokenPath, RankSeen
from tests.support.standstills import IN_LOADER, found, rank, standstill


def silent(number: int, kernel: str = "futex_wait_queue", **more: object) -> RankSeen:
    return rank(number, (), kernel=kernel, **more)


@pytest.mark.parametrize(
    "kernel",
    ["wait_for_partner", "nfs_wait_bit_killable, child poll", "poll_schedule, child fuse_get_req"],
)
def test_a_rank_that_waits_for_a_file_while_no_other_does_is_named(kernel: str) -> None:
    cause = found(standstill(silent(0), silent(1, kernel), silent(2)))

    assert (cause.cause, cause.ranks, cause.nodes) == ("file-awaited", [1], ["n2"])
    assert cause.sureness == "likely"
    assert cause.accused == []


def test_what_all_ranks_do_alike_names_none() -> None:
    """A data loader's workers may wait in pipes for what they are to load."""
    ranks = [silent(number, "futex_wait_queue, child pipe_read") for number in range(3)]

    assert found(standstill(*ranks)).cause == "no-progress"


def test_ranks_that_differ_where_the_kernel_does_not_tell_files_name_none() -> None:
    assert found(standstill(silent(0), silent(1, "do_poll"), silent(2, ""))).cause == "no-progress"


def test_connections_that_are_not_answered_name_the_node_that_they_share() -> None:
    paths = (
        BrokenPath(node="n1", peer="n2", retransmits=6),
        BrokenPath(node="n3", peer="n2", retransmits=5),
    )
    cause = found(standstill(silent(0), silent(1), silent(2), paths=paths))

    assert (cause.cause, cause.nodes, cause.ranks) == ("network-of-group", ["n2"], [1])


def test_a_stopped_rank_among_silent_ones_is_named_alone() -> None:
    paths = (BrokenPath(node="n1", peer="n2", retransmits=6),)
    stopped = silent(1, state="T")
    cause = found(standstill(silent(0), stopped, silent(2), paths=paths))

    assert (cause.cause, cause.ranks) == ("rank-stopped", [1])


def test_a_rank_that_had_ended_before_anybody_looked_may_be_gone() -> None:
    gone = RankSeen(rank=1, node="n2", gone=True)
    cause = found(standstill(rank(0), gone, rank(2)))

    assert (cause.cause, cause.ranks, cause.nodes) == ("rank-gone", [1], ["n2"])
    assert cause.sureness == "possible"


def test_what_is_likely_comes_before_a_rank_that_nobody_has_seen() -> None:
    """A task of the step that had its part done and ended is not what the others wait for."""
    done = RankSeen(rank=3, node="n4", gone=True)
    cause = found(standstill(rank(0), rank(1, IN_LOADER), rank(2), done))

    assert (cause.cause, cause.ranks) == ("data-loader-stuck", [1])


def test_a_rank_of_which_not_even_the_node_is_known_may_be_gone() -> None:
    cause = found(standstill(rank(0), RankSeen(rank=1, node="", gone=True), rank(2)))

    assert (cause.cause, cause.ranks, cause.nodes) == ("rank-gone", [1], [])
