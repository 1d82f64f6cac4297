# SPDX-License-Identifier: Apache-2.0

import pytest
from msgspec import structs
from msgspec.structs import replace

from slurm_health.preflight.agent.node_round import NodeRound, RoundEnding, round_command
from slurm_health.preflight.agent.worker_process import Done, Gone, ScopeEntered
from slurm_health.records.records import GroupAborted, ProbeUsed, Rendezvous, RoundStarted, Sampled
from slurm_health.records.verdict import Outcome
from tests.support.rows import rows

STARTED = RoundStarted(
    round=3,
    name="round 3",
    groups=[["n1", "n2"], ["n3"]],
    rendezvous=[Rendezvous(address="n1", port=4001), Rendezvous(address="n3", port=4003)],
    probes=[ProbeUsed(name="allgather", scope="pair")],
    deadline_s=10.0,
)
NEAR = Rendezvous(address="127.0.0.1", port=4000)


def round_of(node: str = "n2", *, workers: int = 2) -> NodeRound:
    (group,) = (group for group in STARTED.groups if node in group)
    return NodeRound(record=STARTED, node=node, group=group, workers=workers, started_s=0.0)


def sample(*iteration_ms: float, probe: str = "allgather") -> Sampled:
    """Return what one worker measured, before its node and group are named."""
    return Sampled(
        node="",
        group=[],
        round=3,
        probe=probe,
        scope="pair",
        iteration_ms=[[*iteration_ms]],
        world_size=4,
        total_bytes=1024,
    )


def done(outcome: str, detail: str = "", *, own_fault: bool = False, spent: bool = False) -> Done:
    return Done(round=3, outcome=outcome, detail=detail, own_fault=own_fault, spent=spent)


def groups(node: str, local_rank: int, *, workers: int = 2) -> dict[str, dict[str, object]]:
    current = round_of(node, workers=workers)
    far = STARTED.rendezvous[STARTED.groups.index(current.group)]
    command = round_command("a7", current, local_rank, far=far, near=NEAR)
    found: dict[str, dict[str, object]] = command["groups"]  # type: ignore[assignment]
    return found


def test_ranks_follow_the_order_of_the_group_and_within_a_node_that_of_its_workers() -> None:
    ranks = [groups(node, local)["pair"]["rank"] for node in ("n1", "n2") for local in range(2)]

    assert ranks == [0, 1, 2, 3]
    assert groups("n2", 1)["rail"] == {"rank": 1, "world_size": 2}


def test_a_group_of_nobody_else_is_none() -> None:
    assert groups("n3", 0, workers=1) == {}
    assert groups("n3", 0).keys() == {"node"}
    assert groups("n1", 0, workers=1).keys() == {"pair"}


def test_the_batch_of_a_node_is_the_one_that_fits_its_device_with_least_room() -> None:
    current = round_of()
    fits = [replace(sample(probe="gpt_fit"), figures={"micro_batch": batch}) for batch in (10, 5)]

    assert current.take(0, fits[0]) is None
    recorded = current.take(1, fits[1])

    assert isinstance(recorded, Sampled)
    assert recorded.figures == {"micro_batch": 5}


def test_a_quantity_is_recorded_once_all_workers_have_measured_it_or_with_empty_places() -> None:
    current = round_of()

    assert current.take(1, sample(2.0)) is None
    sampled = current.take(0, sample(1.00004, 1.5))
    assert isinstance(sampled, Sampled)
    assert sampled.iteration_ms == [[1.0, 1.5], [2.0]]
    assert current.partial_samples() == []

    current.take(1, sample(2.0, probe="values"))
    assert [each.iteration_ms for each in current.partial_samples()] == [[[], [2.0]]]


def test_a_failure_is_known_before_the_others_are_done_who_stay_if_they_heed_an_abort() -> None:
    current = round_of()
    ending = current.done(0, done("failed", "peer left"))

    assert ending == RoundEnding(outcome=Outcome.FAILED, detail="peer left", unsettled=True)

    settled = current.done(1, done("timed_out", "told to stop"))
    assert settled == RoundEnding(outcome=Outcome.FAILED, detail="peer left")


@rows
def test_what_hangs_while_nccl_connects_is_named_as_closely_as_it_is_known(
    node: str, connecting: list[list[int]], apart: int, said: str
) -> None:
    record = structs.replace(STARTED, options={"apart": 1} if apart else {})
    current = replace(round_of(node, workers=len(connecting)), record=record)
    current.aborted = GroupAborted(round=3, group=current.group, reason="late", timed_out=True)

    for rank, circle in enumerate(connecting):
        each = Done(round=3, outcome="timed_out", detail="told to stop", connecting=circle)
        ending = current.done(rank, each)

    hung = bool(said)
    assert ending == RoundEnding(outcome=Outcome.TIMED_OUT, detail=f"late{said}", connecting=hung)


@pytest.mark.parametrize("spent", ["first", "last"])
def test_workers_are_replaced_with_one_that_is_spent_whichever_of_them_failed(spent: str) -> None:
    current = round_of()
    first = current.done(0, done("failed", "peer left", spent=spent == "first"))
    last = current.done(1, done("timed_out", "told to stop", spent=spent == "last"))

    assert [ending.replace for ending in (first, last) if ending] == [spent == "first", True]


@rows
def test_a_death_is_the_nodes_own_where_no_partner_can_be_its_cause(
    scopes: list[str], crashed: bool
) -> None:
    current = round_of()
    for scope in scopes:
        current.take(1, ScopeEntered(round=3, scope=scope))

    assert current.gone(1, Gone("killed by SIGABRT")) == RoundEnding(
        outcome=Outcome.FAILED,
        detail="check process of device 1 died: killed by SIGABRT",
        crashed=crashed,
        replace=True,
    )


@rows
def test_a_device_that_never_ends_what_it_does_alone_is_named(
    scopes: tuple[str, str], said: str
) -> None:
    current = round_of("n3")
    current.aborted = GroupAborted(round=3, group=current.group, reason="late", timed_out=True)
    for rank, scope in enumerate(scopes):
        current.take(rank, ScopeEntered(round=3, scope=scope))

    assert current.done(0, done("timed_out", "told to stop")) is None

    detail = f"did not finish{said}, and was stopped: late"
    assert current.stuck() == RoundEnding(outcome=Outcome.TIMED_OUT, detail=detail, replace=True)
