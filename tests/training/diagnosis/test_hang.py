# SPDX-License-Identifier: Apache-2.0
"""Which rank does not come to what the others wait in, and whose doing that is."""

from __future__ import annotations

import random

import pytest

from slurm_health.training.diagnosis.samples import BrokenPath, Frame
from tests.support.standstills import (
    IN_BACKWARD,
    IN_CHECKPOINT,
    IN_COLLECTIVE,
    IN_LOADER,
    IN_OTHER,
    IN_OWN_CODE,
    TRAIN,
    flight,
    found,
    rank,
    standstill,
)

IN_BARRIER, IN_RENDEZVOUS = (
    (TRAIN, Frame("torch/distributed/distributed_c10d.py", 5000, name))
    for name in ("barrier", "init_process_group")
)


def test_a_stopped_rank_is_named_with_its_process() -> None:
    diagnosed = found(standstill(rank(0), rank(1, (), state="T"), rank(2)))

    assert (diagnosed.cause, diagnosed.sureness) == ("rank-stopped", "certain")
    assert (diagnosed.ranks, diagnosed.nodes, diagnosed.accused) == ([1], ["n2"], [])
    assert "kill -CONT 101 on n2" in diagnosed.advice


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


@pytest.mark.parametrize(
    ("others", "culprit"),
    [((IN_BACKWARD,) * 3, 1), ((IN_OTHER, IN_COLLECTIVE, IN_COLLECTIVE), 1)],
)
def test_a_rank_in_a_barrier_is_not_where_the_others_are_and_no_network_is_blamed(
    others: tuple[tuple[Frame, ...], ...], culprit: int
) -> None:
    stacks = [others[0], IN_BARRIER, *others[1:]]
    diagnosed = found(standstill(*(rank(number, stack) for number, stack in enumerate(stacks))))

    assert (diagnosed.cause, diagnosed.ranks) == ("collectives-differ", [culprit])


@pytest.mark.parametrize(
    ("places", "ranks"), [(("n1:1", "n1:2", "n1:1"), [1]), (("n1:1",) * 3, [0, 1, 2])]
)
def test_who_has_another_address_of_a_rendezvous_that_never_forms_is_named(
    places: tuple[str, ...], ranks: list[int]
) -> None:
    waiting = (rank(number, IN_RENDEZVOUS, meets=place) for number, place in enumerate(places))
    diagnosed = found(standstill(*waiting))

    assert (diagnosed.cause, diagnosed.ranks) == ("rendezvous-never-formed", ranks)


def test_what_never_entered_by_the_flight_recorder_leads_on_to_where_it_is() -> None:
    records = (
        flight(0, (6, "all_reduce", "retired"), (7, "all_reduce", "scheduled")),
        flight(1, (6, "all_reduce", "retired")),
    )
    diagnosed = found(standstill(rank(0, IN_BACKWARD), rank(1, IN_LOADER)), *records)

    assert diagnosed.cause == "data-loader-stuck"
    assert diagnosed.chain == [
        "CollectiveHangChecker: never-entered",
        "HostHangChecker: data-loader-stuck",
    ]


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


def test_ranks_that_wait_for_each_other_by_sockets_alone_wait_for_the_network() -> None:
    paths = (BrokenPath(node="n1", peer="n2", retransmits=6),)
    elsewhere = (TRAIN, Frame("train.py", 31, "receive"))
    stacks = (IN_OWN_CODE, elsewhere, IN_OWN_CODE)
    ranks = [rank(number, stack) for number, stack in enumerate(stacks)]

    assert found(standstill(*ranks)).cause == "rank-elsewhere"
    diagnosed = found(standstill(*ranks, paths=paths))
    assert (diagnosed.cause, diagnosed.nodes) == ("network-of-group", ["n1", "n2"])


@pytest.mark.parametrize(
    ("reached", "nodes", "words"),
    [
        ({"n3": ("n1",)}, ["n2"], "n3 can reach n1, and not n2"),
        ({"n3": ("n2",), "n4": ()}, ["n1"], "n3 can reach n2, and not n1"),
        ({"n3": ("n1",), "n4": ("n2",)}, ["n1", "n2"], "get no answer"),  # the path alone
        ({"n3": (), "n4": ()}, ["n1", "n2"], "get no answer"),  # a firewall, or all are cut off
    ],
)
def test_of_two_ends_that_the_one_is_cut_off_which_no_third_node_reaches(
    reached: dict[str, tuple[str, ...]], nodes: list[str], words: str
) -> None:
    paths = (BrokenPath(node="n1", peer="n2", retransmits=6),)
    ranks = [rank(number) for number in range(4)]
    diagnosed = found(standstill(*ranks, paths=paths, reached=reached))

    assert (diagnosed.cause, diagnosed.nodes) == ("network-of-group", nodes)
    assert words in diagnosed.description


def test_a_node_to_which_a_connection_is_broken_too_is_silent_and_not_accused() -> None:
    path = BrokenPath(node="n1", peer="n2", retransmits=6)
    diagnosed = found(standstill(rank(0), rank(1, ()), rank(2), paths=(path,), silent=("n2",)))

    assert (diagnosed.cause, diagnosed.nodes, diagnosed.accused) == ("node-silent", ["n2"], [])


@pytest.mark.parametrize(
    ("third", "cause", "sureness", "ranks", "nodes"),
    [
        (IN_COLLECTIVE, "agent-ended", "possible", [], []),
        (IN_LOADER, "data-loader-stuck", "likely", [2], ["n3"]),
    ],
)
def test_a_monitor_that_ended_says_nothing_of_its_node_and_hides_no_rank_that_is_elsewhere(
    third: tuple[Frame, ...], cause: str, sureness: str, ranks: list[int], nodes: list[str]
) -> None:
    diagnosed = found(standstill(rank(0), rank(1, ()), rank(2, third), silent=("n2",)))

    assert (diagnosed.cause, diagnosed.sureness) == (cause, sureness)
    assert (diagnosed.ranks, diagnosed.nodes) == (ranks, nodes)


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
    where = "in a collective" if recorded else "for it"
    assert f"while ranks 0-1,3 wait {where}" in diagnosed.description


CKPT = "/ckpt/a.pt (srv:/ckpt)"


@pytest.mark.parametrize(
    ("waiting", "nodes", "words"),
    [
        ((1,), ["n2"], "rank 1 on n2 waits for storage, /ckpt/a.pt (srv:/ckpt), for 40 s"),
        ((0, 2), [], "ranks 0,2 on n[1,3] wait for storage, /ckpt/a.pt (srv:/ckpt), for 40 s: its"),
        ((0, 1, 2), [], "(srv:/ckpt), for 40 s: its server, or the way to it"),
    ],
)
@pytest.mark.parametrize("stack", [IN_CHECKPOINT, IN_OWN_CODE, ()])
def test_ranks_that_wait_for_files_on_a_server_name_the_file_and_accuse_nobody(
    waiting: tuple[int, ...], nodes: list[str], words: str, stack: tuple[Frame, ...]
) -> None:
    ranks = [
        rank(number, stack, state="D", kernel="nfs_wait", storage=CKPT)
        if number in waiting
        else rank(number, IN_BACKWARD)
        for number in range(3)
    ]
    diagnosed = found(standstill(*ranks))

    assert (diagnosed.cause, diagnosed.accused) == ("file-awaited", [])
    assert (diagnosed.nodes, diagnosed.ranks) == (nodes, list(waiting))
    assert words in diagnosed.description


def test_a_worker_of_a_loader_that_reads_while_its_rank_is_in_a_collective_is_no_cause() -> None:
    reads = rank(1, IN_BACKWARD, kernel="child nfs_wait", storage=CKPT)
    diagnosed = found(standstill(rank(0, IN_LOADER), reads, rank(2, IN_BACKWARD)))

    assert (diagnosed.cause, diagnosed.ranks) == ("data-loader-stuck", [0])
