# SPDX-License-Identifier: Apache-2.0
"""Which rank does not come to what the others wait in, and whose doing that is."""

from __future__ import annotations

import random

import pytest

from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.diagnostician import ActionKind, Diagnostician, observe_hang
from slurm_health.training.diagnosis.inference import InferenceChain
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.seen import BrokenPath, Frame, RankSeen
from tests.support.standstills import (
    FROM_DEVICE,
    IN_BACKWARD,
    IN_CHECKPOINT,
    IN_COLLECTIVE,
    IN_LOADER,
    IN_OTHER,
    IN_OWN_CODE,
    TORCH,
    TRAIN,
    flight,
    found,
    rank,
    standstill,
)


def test_a_stopped_rank_is_named_with_its_process() -> None:
    diagnosed = found(standstill(rank(0), rank(1, (), state="T"), rank(2)))

    assert (diagnosed.cause, diagnosed.sureness) == ("rank-stopped", "certain")
    assert (diagnosed.ranks, diagnosed.nodes, diagnosed.accused) == ([1], ["n2"], [])
    assert "kill -CONT 101 on n2" in diagnosed.advice


def test_a_job_that_is_stopped_as_a_whole_has_no_stopped_rank() -> None:
    diagnosed = found(standstill(rank(0, (), state="T"), rank(1, (), state="T")))

    assert diagnosed.cause == "no-progress"


def test_a_rank_whose_process_has_ended_is_named() -> None:
    diagnosed = found(standstill(rank(0), rank(1, (), gone=True), rank(2)))

    assert (diagnosed.cause, diagnosed.ranks, diagnosed.nodes) == ("rank-gone", [1], ["n2"])


@pytest.mark.parametrize(
    ("stack", "cause", "words"),
    [
        (IN_LOADER, "data-loader-stuck", "waits for the data loader"),
        (IN_CHECKPOINT, "checkpoint-stuck", "is at a checkpoint"),
        (IN_OWN_CODE, "rank-elsewhere", "is in code of its own (augment.py:12)"),
    ],
)
def test_a_rank_outside_any_collective_points_to_its_own_host(
    stack: tuple[Frame, ...], cause: str, words: str
) -> None:
    diagnosed = found(standstill(rank(0, IN_BACKWARD), rank(1, stack), rank(2)))

    assert (diagnosed.cause, diagnosed.ranks, diagnosed.nodes) == (cause, [1], ["n2"])
    assert words in diagnosed.description
    assert "ranks 0,2 wait in a collective" in diagnosed.description


def test_ranks_that_all_wait_for_their_data_are_said_to() -> None:
    diagnosed = found(standstill(rank(0, IN_LOADER), rank(1, IN_LOADER)))

    assert (diagnosed.cause, diagnosed.ranks) == ("data-loader-stuck", [0, 1])
    assert diagnosed.description.endswith("wait for the data loader (train.py:70)")


def test_what_never_entered_by_the_flight_recorder_leads_on_to_where_it_is() -> None:
    records = (
        flight(0, (6, "all_reduce", "retired"), (7, "all_reduce", "scheduled")),
        flight(1, (6, "all_reduce", "retired")),
    )
    diagnosed = found(standstill(rank(0, IN_BACKWARD), rank(1, IN_LOADER)), *records)

    assert diagnosed.cause == "data-loader-stuck"
    assert diagnosed.chain == ["flight-recorder: never-entered", "stacks: data-loader-stuck"]


def test_a_mismatched_collective_is_the_scripts() -> None:
    records = (
        flight(0, (7, "all_reduce", "scheduled")),
        flight(1, (7, "all_gather", "scheduled")),
        flight(2, (7, "all_reduce", "scheduled")),
    )
    diagnosed = found(standstill(rank(0), rank(1, IN_OTHER), rank(2)), *records)

    assert (diagnosed.cause, diagnosed.attribution) == ("mismatched-collective", "user error")
    assert (diagnosed.ranks, diagnosed.nodes) == ([1], ["n2"])


def test_without_a_flight_record_different_collectives_are_only_possibly_the_scripts() -> None:
    diagnosed = found(standstill(rank(0), rank(1, IN_OTHER), rank(2)))

    assert (diagnosed.cause, diagnosed.sureness) == ("collectives-differ", "possible")
    assert diagnosed.ranks == [1]


def test_a_rank_that_is_inside_an_earlier_collective_has_not_stayed_away() -> None:
    """A node whose answers are lost waits in a collective that the others have left."""
    records = (
        flight(0, (6, "all_reduce", "retired"), (7, "all_reduce", "scheduled")),
        flight(1, (6, "all_reduce", "scheduled")),
    )
    diagnosed = found(standstill(rank(0, IN_BACKWARD), rank(1, IN_BACKWARD)), *records)

    assert diagnosed.cause == "network-of-group"


def test_where_nobody_leaves_the_node_to_which_all_broken_connections_lead_is_named() -> None:
    paths = (
        BrokenPath(node="n1", peer="n2", retransmits=6),
        BrokenPath(node="n2", peer="n3", retransmits=5),
    )
    seen = standstill(rank(0), rank(1), rank(2), paths=paths)
    diagnosed = found(seen)

    assert (diagnosed.cause, diagnosed.nodes, diagnosed.accused) == (
        "network-of-group",
        ["n2"],
        [],
    )
    assert "every broken connection leads to n2" in diagnosed.description


def test_of_one_broken_connection_neither_end_is_preferred() -> None:
    paths = (BrokenPath(node="n1", peer="n2", retransmits=6),)
    diagnosed = found(standstill(rank(0), rank(1), rank(2), paths=paths))

    assert diagnosed.nodes == ["n1", "n2"]


def test_a_node_to_which_a_connection_is_broken_too_is_silent_and_not_accused() -> None:
    path = BrokenPath(node="n1", peer="n2", retransmits=6)
    diagnosed = found(standstill(rank(0), rank(1, ()), rank(2), paths=(path,), silent=("n2",)))

    assert (diagnosed.cause, diagnosed.nodes, diagnosed.accused) == ("node-silent", ["n2"], [])


def test_a_monitor_that_ended_says_nothing_of_its_node() -> None:
    diagnosed = found(standstill(rank(0), rank(1, ()), rank(2), silent=("n2",)))

    assert (diagnosed.cause, diagnosed.sureness, diagnosed.nodes) == (
        "monitor-ended",
        "possible",
        [],
    )


def test_a_monitor_that_ended_hides_no_rank_that_is_elsewhere() -> None:
    diagnosed = found(standstill(rank(0), rank(1, ()), rank(2, IN_LOADER), silent=("n2",)))

    assert (diagnosed.cause, diagnosed.ranks) == ("data-loader-stuck", [2])


def test_where_nothing_was_seen_nothing_is_said_but_that() -> None:
    diagnosed = found(standstill(rank(0, ()), rank(1, ())))

    assert (diagnosed.cause, diagnosed.sureness, diagnosed.nodes) == ("no-progress", "possible", [])


def test_a_pause_within_the_allowance_is_no_symptom() -> None:
    data = Collected([standstill(rank(0), rank(1), stalled_s=20.0)])

    assert (
        Diagnostician(observe_hang, InferenceChain(OPERATORS)).diagnose(data).kind
        is ActionKind.NOTHING
    )


def test_no_order_of_what_was_seen_names_a_node_twice_or_accuses_one() -> None:
    dice = random.Random(5)
    stacks = [(), IN_COLLECTIVE, IN_OTHER, IN_BACKWARD, IN_LOADER, IN_CHECKPOINT, IN_OWN_CODE]
    for _ in range(500):
        ranks = [
            rank(n, dice.choice(stacks), state=dice.choice("SRDT"), gone=dice.random() < 0.1)
            for n in range(dice.randint(1, 6))
        ]
        diagnosed = found(standstill(*ranks))
        assert diagnosed.accused == []
        assert len(set(diagnosed.nodes)) == len(diagnosed.nodes)
        assert diagnosed.advice


IN_ITEM = (TRAIN,)


@pytest.mark.parametrize(
    ("stack", "cause"), [(IN_LOADER, "data-loader-stuck"), (IN_OWN_CODE, "rank-elsewhere")]
)
@pytest.mark.parametrize("recorded", [True, False])
def test_the_rank_that_is_elsewhere_is_named_and_not_those_that_wait_for_their_devices(
    stack: tuple[Frame, ...], cause: str, recorded: bool
) -> None:
    ranks = [rank(0, IN_ITEM), rank(1, IN_ITEM), rank(2, stack), rank(3, IN_ITEM)]
    waiting = (7, "all_reduce", "scheduled")
    records = [flight(each, (6, "all_reduce", "completed"), waiting) for each in (0, 1, 3)]
    records.append(flight(2, (6, "all_reduce", "completed")))
    diagnosed = found(standstill(*ranks), *(records if recorded else ()))

    assert (diagnosed.cause, diagnosed.ranks, diagnosed.nodes) == (cause, [2], ["n3"])
    where = "in a collective" if recorded else "for what their devices do"
    assert f"while ranks 0-1,3 wait {where}" in diagnosed.description


def test_where_no_line_has_most_ranks_nobody_is_told_apart() -> None:
    diagnosed = found(standstill(rank(0, IN_ITEM), rank(1, IN_OWN_CODE)))

    assert (diagnosed.cause, diagnosed.ranks) == ("rank-elsewhere", [0, 1])


def test_where_all_devices_are_in_a_collective_that_none_leaves_no_rank_is_elsewhere() -> None:
    ranks = [rank(0, IN_ITEM), rank(1, IN_ITEM), rank(2, IN_OWN_CODE)]
    records = [flight(each, (7, "all_reduce", "scheduled")) for each in range(3)]
    diagnosed = found(standstill(*ranks), *records)

    assert (diagnosed.cause, diagnosed.sureness) == ("network-of-group", "possible")
    assert "(all_reduce)" in diagnosed.description


def test_a_checkpoint_that_waits_for_its_device_is_not_what_holds_up_a_collective_on_it() -> None:
    """Over NCCL a host goes on behind a collective until it needs data, as a checkpoint does."""
    records = [flight(number, (7, "all_gather", "started")) for number in range(3)]
    to_n3 = [
        BrokenPath(node=node, peer="n3", connections=1, retransmits=7) for node in ("n1", "n2")
    ]
    diagnosed = found(
        standstill(*(rank(number, FROM_DEVICE) for number in range(3)), paths=tuple(to_n3)),
        *records,
    )

    assert (diagnosed.cause, diagnosed.nodes) == ("network-of-group", ["n3"])


def test_a_rank_that_writes_its_checkpoint_while_the_others_wait_for_its_device_is_named() -> None:
    diagnosed = found(
        standstill(rank(0, FROM_DEVICE), rank(1, IN_CHECKPOINT), rank(2, FROM_DEVICE))
    )

    assert (diagnosed.cause, diagnosed.ranks) == ("checkpoint-stuck", [1])


SYNCHRONIZES = (
    TRAIN,
    Frame("/home/a/p2p_communication.py", 330, "_communicate"),
    Frame(f"{TORCH}/cuda/__init__.py", 1000, "synchronize"),
)


@pytest.mark.parametrize("others", [IN_COLLECTIVE, IN_ITEM])
@pytest.mark.parametrize(("stack", "gpu_waits"), [(SYNCHRONIZES, False), (SYNCHRONIZES[:2], True)])
@pytest.mark.parametrize("where", [IN_LOADER, IN_OWN_CODE])
def test_a_rank_that_waits_for_its_device_is_not_what_the_others_wait_for(
    stack: tuple[Frame, ...],
    gpu_waits: bool,
    others: tuple[Frame, ...],
    where: tuple[Frame, ...],
) -> None:
    waits = rank(0, stack, gpu_waits=gpu_waits)
    cause = found(
        standstill(waits, rank(1, others), rank(2, where), rank(3, others), rank(4, others))
    )

    assert (cause.ranks, cause.nodes) == ([2], ["n3"])
    assert "while ranks 0-1,3-4 wait" in cause.description


def test_where_every_rank_outside_waits_for_its_device_they_are_still_told() -> None:
    cause = found(standstill(rank(0, SYNCHRONIZES), rank(1), rank(2)))

    assert (cause.cause, cause.ranks) == ("rank-elsewhere", [0])


def test_a_rank_that_loads_comes_before_one_in_code_of_its_own_whatever_their_numbers() -> None:
    cause = found(standstill(rank(0, IN_OWN_CODE), rank(1), rank(2, IN_LOADER), rank(3)))

    assert (cause.cause, cause.ranks) == ("data-loader-stuck", [2])


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
