# SPDX-License-Identifier: Apache-2.0
"""Ranks are compared with those that do the same work; what is shared out unevenly is no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_health.heartbeat import UNKNOWN_REPLICA, place_in
from slurm_health.training.diagnosis.comparison import Comparison
from slurm_health.training.diagnosis.diagnostician import CauseDiagnostician
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport, RankSample
from slurm_health.training.diagnosis.uneven import DATA, STAGES, Uneven, observe_uneven
from slurm_health.training.framework import DataManager

STEPS = 10  # in a window
STAGE_COUNT, REPLICAS = 2, 4
EVEN_S = 0.5

OwnS = Callable[[int, int, int], float]  # of a stage, a replica and a window


def watch(
    own_s: OwnS, *, roles: bool = True, tokens: OwnS = lambda *_: 0.0, nodes: int = 4
) -> tuple[set[int], dict[str, Uneven]]:
    """Return the ranks held slow and what is held uneven, of a pipeline that ran for a while."""
    pulse, comparison = Pulse([f"n{node}" for node in range(nodes)]), Comparison()
    slow: set[int] = set()
    uneven: dict[str, Uneven] = {}
    had_s = dict.fromkeys(range(STAGE_COUNT * REPLICAS), 0.0)
    had_tokens = dict(had_s)
    for window in range(8):
        for rank in had_s:
            stage, replica = divmod(rank, REPLICAS)
            if window:
                had_s[rank] += STEPS * own_s(stage, replica, window)
                had_tokens[rank] += STEPS * tokens(stage, replica, window)
        for node in range(nodes):
            ranks = tuple(
                RankSample(
                    program="0",
                    rank=rank,
                    node=f"n{node}",
                    pid=1,
                    steps=STEPS * window,
                    own_s=had_s[rank],
                    own_steps=STEPS * window,
                    tokens=had_tokens[rank],
                    role=f"stage {rank // REPLICAS}" if roles else "",
                    replica=rank % REPLICAS if roles else UNKNOWN_REPLICA,
                )
                for rank in had_s
                if rank % nodes == node
            )
            pulse.observe(NodeReport(node=f"n{node}", ranks=ranks), float(window))
        slow |= {rank.rank for rank, _ in comparison.window(pulse.programs.values())}
        uneven |= {work.name: work for work in comparison.uneven(pulse.programs.values())}
    return slow, uneven


def even(stage: int, _replica: int, _window: int) -> float:
    return EVEN_S * (1 + stage)


def test_a_stage_with_more_to_compute_is_uneven_and_none_of_its_ranks_is_slow() -> None:
    slow, uneven = watch(even)

    assert slow == set()
    assert uneven.keys() == {STAGES}
    assert (uneven[STAGES].roles, uneven[STAGES].ranks) == (("stage 1",), (4, 5, 6, 7))
    assert uneven[STAGES].times == pytest.approx(2.0)


def test_a_slow_rank_of_the_light_stage_is_found_although_it_is_as_fast_as_the_heavy_one() -> None:
    slow, _ = watch(lambda *at: even(*at) * (1.5 if at[:2] == (0, 2) else 1.0))

    assert slow == {2}


def test_a_slow_rank_alone_does_not_make_its_stage_uneven() -> None:
    slow, uneven = watch(
        lambda stage, replica, _: EVEN_S * (2 if (stage, replica) == (1, 3) else 1)
    )

    assert (slow, uneven) == ({7}, {})


def test_without_roles_a_quarter_of_the_ranks_is_not_held_slow_but_may_be_a_stage() -> None:
    slow, uneven = watch(
        lambda stage, replica, _: EVEN_S * (2 if stage and replica < 3 else 1), roles=False
    )

    assert slow == set()
    assert (uneven[STAGES].roles, uneven[STAGES].ranks) == ((), (4, 5, 6))


def test_without_roles_one_rank_of_many_is_still_held_slow() -> None:
    slow, uneven = watch(lambda *_: EVEN_S, roles=False)
    assert (slow, uneven) == (set(), {})

    slow, uneven = watch(lambda s, r, _: EVEN_S * (2 if (s, r) == (0, 1) else 1), roles=False)
    assert (slow, uneven) == ({1}, {})


def test_replicas_that_are_slower_in_turn_have_uneven_data() -> None:
    slow, uneven = watch(lambda _, r, window: EVEN_S * (1.4 if window % REPLICAS == r else 1.0))

    assert slow == set()
    assert uneven.keys() == {DATA}


def test_ranks_that_are_slower_in_turn_without_their_replica_have_no_uneven_data() -> None:
    slow, uneven = watch(
        lambda s, r, window: EVEN_S * (1.4 if window % 8 == s * REPLICAS + r else 1.0)
    )

    assert (slow, uneven) == (set(), {})


def test_a_replica_that_is_always_the_slowest_is_held_slow_and_not_its_data() -> None:
    slow, uneven = watch(lambda *at: EVEN_S * (1.4 if at[1] == 1 else 1.0))

    assert (slow, uneven) == ({1, 5}, {})


def test_a_rank_with_more_tokens_has_uneven_data_and_is_not_slow() -> None:
    more: OwnS = lambda s, r, _: 1.5 if (s, r) == (0, 1) else 1.0  # noqa: E731
    slow, uneven = watch(lambda *at: EVEN_S * more(*at), tokens=lambda *at: 4096 * more(*at))

    assert slow == set()
    assert uneven.keys() == {DATA}
    assert "1.50 times the usual tokens" in uneven[DATA].evidence


def test_a_rank_that_is_slower_than_its_tokens_explain_is_slow() -> None:
    slow, _ = watch(
        lambda s, r, _: EVEN_S * (2.0 if (s, r) == (0, 1) else 1.0),
        tokens=lambda s, r, _: 4096 * (1.2 if (s, r) == (0, 1) else 1.0),
    )

    assert slow == {1}


def test_a_rank_with_fewer_tokens_that_takes_the_usual_time_is_not_slow() -> None:
    slow, _ = watch(
        lambda *_: EVEN_S, tokens=lambda s, r, _: 4096 * (0.5 if (s, r) == (0, 1) else 1.0)
    )

    assert slow == set()


@pytest.mark.parametrize(
    ("uneven", "words", "sureness"),
    [
        (Uneven(name=STAGES, roles=("stage 3",), times=1.6), "stage 3 takes 1.60", "likely"),
        (
            Uneven(name=STAGES, roles=("stage 3",), times=1.6, one_node=True),
            "or its only node is slow",
            "possible",
        ),
        (Uneven(name=STAGES, times=1.6, ranks=(1, 2)), "2 ranks take 1.60 times", "possible"),
        (Uneven(name=DATA, times=1.2), "batches are uneven", "likely"),
    ],
)
def test_what_is_uneven_is_named_and_accuses_no_rank_and_no_node(
    uneven: Uneven, words: str, sureness: str
) -> None:
    diagnostician = CauseDiagnostician(observe_uneven, OPERATORS)
    diagnosed = diagnostician.diagnose(data_manager=DataManager([uneven])).diagnosed

    assert diagnosed is not None
    assert words in diagnosed.description
    assert (diagnosed.cause, diagnosed.sureness) == (uneven.name, sureness)
    assert (diagnosed.nodes, diagnosed.ranks, diagnosed.accused) == ([], [], [])


def test_a_role_follows_from_the_places_in_process_groups() -> None:
    megatron = {
        "default_pg": range(16),
        "PIPELINE_MODEL_PARALLEL_GROUP": [2, 6, 10, 14],
        "EXPERT_MODEL_PARALLEL_GROUP": [4, 5, 6, 7],
        "DATA_PARALLEL_GROUP": [4, 6],
        "TENSOR_MODEL_PARALLEL_GROUP": [6, 7],
        "EXPERT_DATA_PARALLEL_GROUP": [6],
    }

    assert place_in(megatron, 6) == ("pipeline 1, expert 2", 1)
    assert place_in({"mesh_pp": [0, 1], "mesh_dp": [1, 3]}, 1) == ("pipeline 1", 0)
    assert place_in({"default_pg": range(4), "mesh_pp": [2, 3]}, 1) == ("", UNKNOWN_REPLICA)
