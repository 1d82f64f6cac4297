# SPDX-License-Identifier: Apache-2.0
"""Who holds the others up, on simulated trainings whose hosts run ahead of their devices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.collectives import (
    CollectiveState,
    FlightRecord,
    Operation,
    Reached,
    Transfer,
    Why,
    reached_of,
)

STEPS = 6


@dataclass(frozen=True)
class Call:
    """What a rank's host enqueues; `waited_for`: the host goes on once the device has done it."""

    group: str
    members: tuple[int, ...]
    sequence: int
    waited_for: bool = False
    transfer: bool = False


@dataclass
class Rank:
    """The host has enqueued `calls[:host]`, the device has done `calls[:device]`."""

    calls: Sequence[Call]
    stops_at: int
    host: int = 0
    device: int = 0
    sees: bool = True
    over: list[Call] = field(default_factory=list)


def programs(tensor: int, pipeline: int, data: int, seed: int) -> list[list[Call]]:
    """Return what each rank calls, in stages of a pipeline of tensor groups, `data` times."""
    chance = random.Random(seed)
    host_waits = {each: chance.random() < 0.3 for each in product(range(STEPS), "tpd")}
    counts: dict[tuple[int, str], int] = {}
    calls: list[list[Call]] = [[] for _ in range(tensor * pipeline * data)]

    def call(step: int, kind: str, name: str, members: tuple[int, ...]) -> None:
        for rank in members:
            counts[rank, name] = counts.get((rank, name), 0) + 1
            entry = Call(name, members, counts[rank, name], host_waits[step, kind], kind == "p")
            calls[rank].append(entry)

    def rank(d: int, p: int, t: int) -> int:
        return (d * pipeline + p) * tensor + t

    for step in range(STEPS):
        for p in range(pipeline):
            for d, t in product(range(data), range(tensor)):
                if p:
                    ends = (rank(d, p - 1, t), rank(d, p, t))
                    call(step, "p", f"p{ends}", ends)
            for d in range(data):
                call(step, "t", f"t{d}.{p}", tuple(rank(d, p, t) for t in range(tensor)))
        for p, t in product(range(pipeline), range(tensor)):
            call(step, "d", f"d{p}.{t}", tuple(rank(d, p, t) for d in range(data)))
    return calls


def run(ranks: Sequence[Rank]) -> None:
    """Let hosts and devices go on until nothing moves."""
    moved = True
    while moved:
        moved = False
        for each in ranks:
            while each.host < min(each.stops_at, len(each.calls)):
                before = each.calls[each.host - 1] if each.host else None
                if before and before.waited_for and each.device < each.host:
                    break
                each.host += 1
                moved = True
        for each in ranks:
            if each.device >= each.host:
                continue
            call = each.calls[each.device]
            heads = [ranks[member] for member in call.members]
            if all(
                head.device < head.host
                and head.calls[head.device].group == call.group
                and head.calls[head.device].sequence == call.sequence
                for head in heads
            ):
                for head in heads:
                    head.device += 1
                moved = True


def recorded(number: int, rank: Rank) -> FlightRecord:
    """Return what the rank's Flight Recorder has."""
    done = rank.device if rank.sees else rank.device // 2
    calls = rank.calls[: rank.host]
    operations = tuple(
        Operation(
            group=each.group,
            sequence=each.sequence,
            what="all_reduce",
            state="completed" if index < done else "scheduled",
        )
        for index, each in enumerate(calls)
        if not each.transfer
    )
    transfers = {
        (next(peer for peer in each.members if peer != number), each.members[0] == number)
        for index, each in enumerate(calls)
        if each.transfer and index >= done
    }
    return FlightRecord(
        rank=number,
        operations=operations,
        members={each.group: each.members for each in rank.calls if not each.transfer},
        reached=reached_of(operations),
        transfers=tuple(Transfer(peer=peer, sends=sends) for peer, sends in sorted(transfers)),
    )


def simulated(
    shape: tuple[int, int, int], bad: dict[int, int], seed: int, *, silent: bool = False
) -> tuple[list[FlightRecord], list[Rank]]:
    """Return the records of a training whose ranks `bad` stop before the call of that number."""
    calls = programs(*shape, seed)
    ranks = [Rank(each, bad.get(number, len(each))) for number, each in enumerate(calls)]
    run(ranks)
    records = [
        recorded(number, rank)
        for number, rank in enumerate(ranks)
        if not (silent and number in bad)
    ]
    return records, ranks


SHAPES = [(2, 2, 2), (4, 1, 2), (1, 4, 2), (2, 4, 1), (1, 1, 8), (4, 2, 2)]


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 10_000),
    silent=st.booleans(),
    data=st.data(),
)
def test_of_any_training_none_but_those_that_stopped_are_named(
    shape: tuple[int, int, int], seed: int, silent: bool, data: st.DataObject
) -> None:
    world = shape[0] * shape[1] * shape[2]
    bad = data.draw(
        st.dictionaries(st.integers(0, world - 1), st.integers(0, 20), min_size=1, max_size=2)
    )
    records, _ = simulated(shape, bad, seed, silent=silent)
    named = {each.rank for each in CollectiveState(records).culprits}
    assert named <= bad.keys()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_stopped_is_found_from_group_to_group(
    shape: tuple[int, int, int], silent: bool
) -> None:
    world = shape[0] * shape[1] * shape[2]
    found = 0
    for seed in range(40):
        bad = random.Random(seed).randrange(world)
        records, ranks = simulated(shape, {bad: 7}, seed, silent=silent)
        assert any(each.device < len(each.calls) for each in ranks)
        found += {each.rank for each in CollectiveState(records).culprits} == {bad}
    # What it had enqueued when its host stopped may still wait for others: then none is named.
    assert found >= 30


def test_a_training_that_goes_well_has_no_culprit() -> None:
    for shape, seed in product(SHAPES, range(10)):
        assert CollectiveState(simulated(shape, {}, seed)[0]).culprits == ()


def test_a_device_whose_works_others_left_long_ago_is_behind_though_its_host_went_on() -> None:
    records = [
        FlightRecord(rank=0, reached={"0": Reached(9, 3, (4, 9))}),
        FlightRecord(rank=1, reached={"0": Reached(9, 7, (8, 9))}),
    ]
    (culprit,) = CollectiveState(records).culprits
    assert (culprit.rank, culprit.why) == (0, Why.DEVICE_BEHIND)
    difference = CollectiveState(records).difference
    assert difference is not None
    assert difference.description == (
        "on rank 0, collective 4 of group 0 is not over, and rank 1 left it collectives ago"
    )


def test_one_work_behind_is_a_path_that_loses_data_and_no_rank() -> None:
    records = [
        FlightRecord(rank=0, reached={"0": Reached(7, 6, (7, 7))}),
        FlightRecord(rank=1, reached={"0": Reached(8, 7, (8, 8))}),
    ]
    assert CollectiveState(records).culprits == ()


def test_where_ranks_wait_for_each_other_in_a_circle_none_is_named() -> None:
    members: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (0, 1)}
    records = [
        FlightRecord(rank=0, members=members, reached={"a": Reached(1, 0, (1, 1))}),
        FlightRecord(rank=1, members=members, reached={"b": Reached(1, 0, (1, 1))}),
    ]
    assert CollectiveState(records).culprits == ()


def test_where_most_ranks_left_no_record_none_of_them_is_named() -> None:
    members = {"0": tuple(range(8))}
    waiting = {"0": Reached(5, 4, (5, 5))}
    records = [FlightRecord(rank=rank, members=members, reached=waiting) for rank in range(4)]
    assert CollectiveState(records).culprits == ()
    records += [FlightRecord(rank=rank, members=members, reached=waiting) for rank in range(4, 7)]
    assert [each.rank for each in CollectiveState(records).culprits] == [7]


def test_a_full_buffer_without_a_word_of_a_group_does_not_show_that_the_group_was_not_used() -> (
    None
):
    members: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (0, 1)}
    waits = FlightRecord(rank=0, members=members, reached={"a": Reached(5, 4, (5, 5))})
    used = FlightRecord(
        rank=1, members=members, reached={"b": Reached(900, 900, None)}, whole=False
    )
    assert CollectiveState([waits, used]).culprits == ()


def test_several_ranks_that_began_no_transfer_are_told_in_the_plural() -> None:
    waits = tuple(Transfer(peer=peer, sends=True) for peer in (1, 2))
    other = {"x": Reached(4, 4, None)}
    difference = CollectiveState(
        [
            FlightRecord(rank=0, transfers=waits),
            *(FlightRecord(rank=rank, reached=other) for rank in (1, 2)),
        ]
    ).difference
    assert difference is not None
    assert difference.description == (
        "ranks 1-2 never began their sides of a transfer that rank 0 waits for"
    )


def test_a_dump_that_could_not_be_read_does_not_show_that_its_rank_stayed_away() -> None:
    members = {"0": (0, 1, 2)}
    waiting = {"0": Reached(5, 4, (5, 5))}
    records = [
        FlightRecord(rank=rank, members={**members}, reached=waiting, transfers=transfers)
        for rank, transfers in ((0, ()), (1, (Transfer(peer=2, sends=True),)))
    ]
    assert [each.rank for each in CollectiveState(records).culprits] == [2]
    assert CollectiveState([*records, FlightRecord(rank=2, whole=False)]).culprits == ()


def test_a_stage_that_waits_to_receive_leads_to_the_stage_before_it() -> None:
    """Stage 1 is missing in its data group because stage 0 sent nothing."""
    members: dict[str, tuple[int, ...]] = {"d": (1, 3)}
    records = [
        FlightRecord(rank=0, reached={"x": Reached(4, 4, None)}),
        FlightRecord(rank=1, members=members, transfers=(Transfer(peer=0, sends=False),)),
        FlightRecord(rank=3, members=members, reached={"d": Reached(2, 1, (2, 2))}),
    ]
    (culprit,) = CollectiveState(records).culprits
    assert (culprit.rank, culprit.why, culprit.waiting) == (0, Why.NO_TRANSFER, (1,))
    difference = CollectiveState(records).difference
    assert difference is not None
    assert difference.description == (
        "rank 0 never began its side of a transfer that rank 1 waits for"
    )


@pytest.mark.parametrize("told_once", [False, True])
def test_groups_that_torch_calls_alike_are_told_apart_by_their_ranks(told_once: bool) -> None:
    """Before torch hashed the names, sibling groups of dist.split_group shared theirs."""
    records = []
    for rank in range(4):
        tensor = Operation(
            group="1 tp (nccl)",
            sequence=1,
            what="all_reduce",
            sizes=f"[[4, {4096 if rank < 2 else 8192}]]",
            state="completed",
        )
        world = Operation(group="0 (nccl)", sequence=1, what="all_reduce", state="started")
        operations = (tensor, world) if rank != 3 else (tensor,)
        members = {"0": (0, 1, 2, 3), "1 tp": (0, 1) if rank < 2 else (2, 3)}
        if told_once and rank % 2:
            members = {}
        records.append(FlightRecord(rank=rank, operations=operations, members=members))

    difference = CollectiveState(records).difference
    assert difference is not None
    assert not difference.mismatched
    assert difference.description == (
        "rank 3 never entered collective 1 of group 0 (nccl) (all_reduce), in which ranks 0-2"
        " waited"
    )


def test_who_is_behind_in_one_of_two_groups_of_the_same_name_is_not_measured_by_the_other() -> None:
    pairs: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))
    records = [
        FlightRecord(rank=rank, members={"1": pair}, reached={"1 (nccl)": reached})
        for pair, reached in zip(pairs, (Reached(3, 2, (3, 3)), Reached(9, 9)), strict=True)
        for rank in pair
    ]
    assert CollectiveState(records).culprits == ()
    late = FlightRecord(rank=1, members={"1": (0, 1)}, reached={"1 (nccl)": Reached(2, 2)})
    assert [each.rank for each in CollectiveState([records[0], late, *records[2:]]).culprits] == [1]
