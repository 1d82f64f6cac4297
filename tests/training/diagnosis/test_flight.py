# SPDX-License-Identifier: Apache-2.0
"""Who holds the others up, on simulated trainings whose hosts run ahead of their devices."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.collectives import (
    CollectiveState,
    FlightRecord,
    Operation,
    Transfer,
    reached_of,
)
from tests.support.rows import rows

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


@rows
def test_who_holds_the_others_up_is_named_only_where_the_records_show_it(
    records: list[FlightRecord], ranks: list[int], words: str
) -> None:
    state = CollectiveState(records)
    assert [culprit.rank for culprit in state.culprits] == ranks
    assert (state.difference.description if state.difference else "").startswith(words)
