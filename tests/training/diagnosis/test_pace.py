# SPDX-License-Identifier: Apache-2.0
"""Simulated steps, window by window: which ranks are slow, what is uneven, which link is slow."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from slurm_health.heartbeat import UNKNOWN_REPLICA, place_in
from slurm_health.records.script_records import EventKind
from slurm_health.training.diagnosis.pace import (
    DATA,
    STAGES,
    PaceAnalysis,
    PaceFinding,
    speeds_of,
)
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport, RankSample
from tests.support.rows import rows

STAGE_COUNT, REPLICAS, NODES = 2, 4, 4
EVEN_S, STEP_S = 0.5, 2.0
STEPS = 10  # in a window

Figure = Callable[[int, int, int], float]  # of a stage, a replica and a window


@dataclass(kw_only=True)
class Pipeline:
    """Eight ranks; `restarts` is the window in which their steps begin anew."""

    own_s: Figure = lambda *_: EVEN_S
    step_s: Figure = lambda *_: STEP_S
    tokens: Figure = lambda *_: 0.0
    loading_s: Figure = lambda *_: 0.0
    roles: bool = True
    restarts: int = -1

    def findings(self, windows: int = 8) -> list[tuple[int, PaceFinding]]:
        """Return what is new, with the window that showed it."""
        pulse, pace = Pulse([f"n{node}" for node in range(NODES)]), PaceAnalysis()
        ranks = [divmod(rank, REPLICAS) for rank in range(STAGE_COUNT * REPLICAS)]
        totals = {at: dict.fromkeys(("own_s", "tokens", "loading_s"), 0.0) for at in ranks}
        now_s, steps, findings = 1000.0, 1, []
        for window in range(windows + 1):
            if window:
                now_s += STEPS * self.step_s(0, 0, window)
                steps = 1 if window == self.restarts else steps + STEPS
            samples = []
            for rank, at in enumerate(ranks):
                for name, total in totals[at].items():
                    added = STEPS * getattr(self, name)(*at, window) if window else 0.0
                    totals[at][name] = total + added
                sample = RankSample(
                    program="0",
                    rank=rank,
                    node=f"n{rank % NODES}",
                    pid=1,
                    steps=steps,
                    own_s=totals[at]["own_s"],
                    own_steps=steps,
                    loading_s=totals[at]["loading_s"],
                    tokens=totals[at]["tokens"],
                    role=f"stage {at[0]}" if self.roles else "",
                    replica=at[1] if self.roles else UNKNOWN_REPLICA,
                )
                samples.append(sample)
            for node in range(NODES):
                own = tuple(samples[node::NODES])
                pulse.observe(NodeReport(node=f"n{node}", ranks=own), now_s)
            new = pace.close_window(pulse.programs.values())
            findings += [(window, finding) for finding in new]
        return findings


def factor(times: float, *places: tuple[int, int]) -> Figure:
    """Return a figure that is `times` as large at some stages and replicas."""
    return lambda stage, replica, _: times if (stage, replica) in places else 1.0


def times(first: Figure, second: Figure | float) -> Figure:
    return lambda *at: first(*at) * (second if isinstance(second, float) else second(*at))


HEAVY_STAGE: Figure = lambda stage, *_: 1.0 + stage  # noqa: E731
IN_TURN: Figure = lambda _, replica, window: 1.4 if window % REPLICAS == replica else 1.0  # noqa: E731
RANKS_IN_TURN: Figure = lambda s, r, w: 1.4 if w % 8 == s * REPLICAS + r else 1.0  # noqa: E731


@pytest.mark.parametrize(
    ("own", "tokens", "roles", "slow", "uneven"),
    [
        (factor(1.0), None, True, [], {}),
        (factor(1.09, (0, 2)), None, True, [], {}),
        (factor(1.11, (0, 2)), None, True, [2], {}),
        (HEAVY_STAGE, None, True, [], {STAGES: (4, 5, 6, 7)}),
        # As fast as the heavy stage, and slow for the light one.
        (times(HEAVY_STAGE, factor(1.5, (0, 2))), None, True, [2], {STAGES: (4, 5, 6, 7)}),
        (factor(2.0, (1, 3)), None, True, [7], {}),
        # Without roles a quarter of the ranks may be a stage; one of eight is slow.
        (factor(2.0, (1, 0), (1, 1), (1, 2)), None, False, [], {STAGES: (4, 5, 6)}),
        (factor(2.0, (0, 1)), None, False, [1], {}),
        (IN_TURN, None, True, [], {DATA: (0, 4)}),
        (RANKS_IN_TURN, None, True, [], {}),
        (factor(1.4, (0, 1), (1, 1)), None, True, [1, 5], {}),
        # More tokens explain more time, but not all of it, and fewer excuse no usual time.
        (factor(1.5, (0, 1)), factor(1.5, (0, 1)), True, [], {DATA: (1,)}),
        (factor(2.0, (0, 1)), factor(1.2, (0, 1)), True, [1], {}),
        (factor(1.0), factor(0.5, (0, 1)), True, [], {}),
    ],
)
def test_ranks_are_compared_with_those_that_do_the_same_work(
    own: Figure,
    tokens: Figure | None,
    roles: bool,
    slow: list[int],
    uneven: dict[str, tuple[int, ...]],
) -> None:
    findings = Pipeline(
        own_s=times(own, EVEN_S),
        tokens=times(tokens, 4096.0) if tokens else lambda *_: 0.0,
        roles=roles,
    ).findings()

    ranks = [f.ranks[0] for _, f in findings if f.event is EventKind.STRAGGLER]
    work = {f.name: f.ranks for _, f in findings if f.event is EventKind.UNEVEN}
    assert sorted(ranks) == slow
    if DATA in uneven and own is IN_TURN:  # which replica is the slowest depends on the window
        assert work.keys() == uneven.keys()
    else:
        assert work == {**work, **uneven}
        assert uneven or not work


def test_a_slow_rank_is_reported_once_with_what_its_steps_cost() -> None:
    own, loading = times(factor(2.0, (0, 2)), EVEN_S), times(factor(30.0, (0, 2)), 0.01)
    ((window, finding),) = Pipeline(own_s=own, loading_s=loading).findings(windows=12)

    assert (window, finding.ranks, finding.nodes) == (5, (2,), ("n2",))
    assert finding.ratio == pytest.approx(2.0)
    assert finding.cost.own_ms == pytest.approx(1000)
    assert (finding.cost.loading_ms, finding.usual.loading_ms) == pytest.approx((300, 10))


@rows
def test_steps_that_wait_longer_for_minutes_are_reported_once(
    step_s: list[float], own_s: list[float], window: int | None
) -> None:
    findings = Pipeline(
        own_s=lambda *at: own_s[at[2] - 1], step_s=lambda *at: step_s[at[2] - 1]
    ).findings(windows=len(step_s))

    assert [at for at, _ in findings] == ([window] if window else [])
    if window:
        (_, finding) = findings[0]
        assert finding.event is EventKind.SLOWDOWN
        assert (finding.cost.step_ms, finding.usual.step_ms) == pytest.approx((2000, 500))


def test_ranks_that_start_again_are_compared_anew() -> None:
    slow = times(factor(2.0, (0, 2)), EVEN_S)
    ((window, _),) = Pipeline(own_s=slow, restarts=4).findings(windows=12)

    assert window == 9


def test_speeds_are_of_what_was_sent_between_two_looks_to_nodes_of_the_job() -> None:
    before = {"n1": {"10.0.0.2": (1 << 20, 1.0), "10.0.0.9": (0, 0.0), "10.0.0.3": (9 << 20, 1.0)}}
    after = {
        "n1": {"10.0.0.2": (11 << 20, 3.0), "10.0.0.9": (9 << 20, 1.0), "10.0.0.3": (1 << 20, 0.5)}
    }
    addresses = {"10.0.0.2": "n2", "10.0.0.3": "n3"}

    (path,) = speeds_of(before, after, addresses, ["n1", "n2", "n3"])
    assert (path.node, path.peer, path.mb_per_s) == ("n1", "n2", 5.243)


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
