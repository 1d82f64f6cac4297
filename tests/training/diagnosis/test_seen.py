# SPDX-License-Identifier: Apache-2.0
"""Whether a training hangs, by what was seen of its ranks, and what stacks and paths say."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_health.training.diagnosis.pace import PATIENCE
from slurm_health.training.diagnosis.seen import (
    BrokenPath,
    Doing,
    Frame,
    paths_by_node,
    place_of,
    still_works,
)
from tests.support.standstills import (
    IN_CHECKPOINT,
    IN_COLLECTIVE,
    IN_LOADER,
    IN_OWN_CODE,
    rank,
    standstill,
)


def test_a_rank_that_computes_or_writes_keeps_a_pause_from_being_a_hang() -> None:
    busy = standstill(rank(0, IN_CHECKPOINT, cpu_share=0.9), rank(1))
    writes = standstill(rank(0, IN_CHECKPOINT, io_bytes=1 << 30), rank(1))

    assert still_works(busy, [1]) == "rank 0 on n1 still works"
    assert still_works(writes, [1]) == "rank 0 on n1 still works"


def test_a_rank_that_spins_while_it_waits_for_the_others_does_not_work() -> None:
    assert still_works(standstill(rank(0, cpu_share=1.0), rank(1)), [0, 1]) == ""


def test_a_rank_that_would_compute_if_it_had_a_processor_keeps_a_pause_from_being_a_hang() -> None:
    starved = standstill(rank(0, (), cpu_share=0.02, unserved_share=0.9), rank(1))
    jostled = standstill(rank(0, (), cpu_share=0.02, unserved_share=0.1), rank(1))
    in_turn = standstill(rank(0, IN_COLLECTIVE, unserved_share=0.9), rank(1))

    assert still_works(starved, [1]) == "rank 0 on n1 is ready to run, and has no processor"
    assert still_works(jostled, [1]) == ""
    assert still_works(in_turn, [0, 1]) == ""


def test_an_evaluation_on_all_ranks_may_take_as_long_as_it_likes() -> None:
    late = standstill(
        rank(0, IN_OWN_CODE, cpu_share=1.0), rank(1, IN_OWN_CODE, cpu_share=1.0), stalled_s=86400.0
    )

    assert "still works" in still_works(late, [])


def test_a_rank_that_works_by_itself_for_very_long_hangs_all_the_same() -> None:
    late = standstill(rank(0, IN_OWN_CODE, cpu_share=1.0), rank(1), stalled_s=PATIENCE.working_s)

    assert still_works(late, [1]) == ""


PDB = Frame("/usr/lib/python3.12/pdb.py", 489, "interaction")


@pytest.mark.parametrize("held", [{"state": "t"}, {"stack": (Frame("train.py", 3, "main"), PDB)}])
def test_a_rank_that_somebody_debugs_holds_up_the_others_for_as_long_as_it_takes(
    held: dict[str, Any],
) -> None:
    seen = standstill(rank(0), rank(1, **held), rank(2), stalled_s=7200.0)

    assert still_works(seen, {0, 2}) == "rank 1 on n2 is held by a debugger"


def test_a_script_that_runs_under_a_debugger_is_not_held_by_it() -> None:
    below = (Frame("/usr/lib/python3.12/pdb.py", 1900, "_run"), *IN_COLLECTIVE)

    assert still_works(standstill(rank(0), rank(1, below)), {0, 1}) == ""


def test_storage_gets_more_time_than_a_rank_that_just_sleeps() -> None:
    slow = standstill(rank(0, IN_CHECKPOINT, state="D"), rank(1))
    dead = standstill(rank(0, IN_CHECKPOINT, state="D"), rank(1), stalled_s=PATIENCE.storage_s)

    assert "waits for storage" in still_works(slow, [1])
    read = standstill(rank(0, IN_LOADER, state="D"), rank(1), stalled_s=PATIENCE.reading_s)
    assert still_works(read, [1], loading=[0]) == ""
    assert "waits for storage" in still_works(read, [1])
    assert still_works(dead, [1]) == ""


def test_ranks_that_end_one_after_another_are_no_hang() -> None:
    """The first one still saves the model, and sends it where no counter sees it."""
    last = standstill(rank(0, IN_OWN_CODE), rank(1, (), gone=True))

    assert "have ended" in still_works(last, [])


def test_a_collective_inside_a_data_loader_or_checkpoint_is_a_collective() -> None:
    place = place_of([*IN_CHECKPOINT, *IN_COLLECTIVE[1:]])

    assert (place.doing, place.what, place.at) == (Doing.COLLECTIVE, "all_reduce", "train.py:70")


def test_connections_are_added_up_by_node_and_peer() -> None:
    told = {"n1": [("10.0.0.2", 5), ("10.0.0.2", 7), ("10.9.9.9", 4)]}

    assert paths_by_node(told, {"10.0.0.2": "n2"}) == (
        BrokenPath(node="n1", peer="10.9.9.9", connections=1, retransmits=4),
        BrokenPath(node="n1", peer="n2", connections=2, retransmits=7),
    )
