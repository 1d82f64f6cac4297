# SPDX-License-Identifier: Apache-2.0
"""Steps that take longer than before, and the link that explains it; time is told."""

from __future__ import annotations

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.diagnostician import (
    CauseDiagnostician,
    observe_slowdown,
)
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.slow_steps import (
    Longer,
    PathSpeed,
    RankSteps,
    Slowdown,
    SlowSteps,
    speeds_of,
)
from slurm_health.training.framework import DataManager

WINDOW_S = 20.0
NODES = ("n1", "n2", "n3")


def windows(*steps: tuple[float, float]) -> list[Longer | None]:
    """What is said window by window of three ranks with these steps and own times, in seconds."""
    slow = SlowSteps()
    so_far = RankSteps(steps=0, last_s=0.0)
    said = [slow.window(dict.fromkeys(range(3), so_far))]
    for step_s, own_s in steps:
        count = int(WINDOW_S / step_s)
        so_far = RankSteps(
            steps=so_far.steps + count,
            last_s=so_far.last_s + count * step_s,
            own_s=so_far.own_s + count * own_s,
            own_steps=so_far.own_steps + count,
        )
        said.append(slow.window(dict.fromkeys(range(3), so_far)))
    return said[1:]


def test_steps_that_wait_longer_in_three_windows_on_end_are_told_once() -> None:
    said = windows(*[(0.5, 0.4)] * 4, *[(2.0, 0.4)] * 6)

    (told,) = [each for each in said if each is not None]
    assert said.index(told) == 6
    assert (round(told.now.step_ms), round(told.usual.step_ms)) == (2000, 500)


def test_steps_that_compute_longer_are_nobody_elses() -> None:
    assert not any(windows(*[(0.5, 0.4)] * 4, *[(2.0, 1.9)] * 6))


def test_a_rank_without_a_processor_keeps_others_waiting_and_is_no_slow_network() -> None:
    # One node of three with a twenty-fifth of a core. How long a step and a rank's own part took
    # was seen; the own part before that was at least 0.51 s.
    assert not any(windows(*[(0.606, 0.54)] * 6, *[(1.366, 1.09)] * 6))


def test_a_pause_in_some_windows_is_nothing_new() -> None:
    assert not any(windows(*[(0.5, 0.4), (1.0, 0.4)] * 6))


def test_slow_steps_from_the_start_are_not_known_to_be_slow() -> None:
    assert not any(windows(*[(4.0, 0.4)] * 12))


def test_ranks_that_start_again_begin_anew() -> None:
    slow = SlowSteps()
    slow.window({0: RankSteps(steps=100, last_s=50.0)})
    assert slow.window({0: RankSteps(steps=3, last_s=60.0)}) is None
    assert slow.window({0: RankSteps(steps=40, last_s=80.0)}) is None


def diagnose(*speeds: tuple[str, str, float]) -> Diagnosed:
    slowdown = Slowdown(
        step_ms=2000.0,
        usual_ms=500.0,
        own_ms=400.0,
        nodes=NODES,
        speeds=tuple(PathSpeed(node=n, peer=peer, mb_per_s=speed) for n, peer, speed in speeds),
    )
    diagnostician = CauseDiagnostician(observe_slowdown, OPERATORS)
    found = diagnostician.diagnose(data_manager=DataManager([slowdown])).diagnosed
    assert found is not None
    assert found.accused == []
    return found


def test_the_node_where_all_slow_connections_meet_is_named() -> None:
    found = diagnose(("n1", "n2", 2.4), ("n2", "n3", 2.5), ("n3", "n1", 800.0))

    assert (found.cause, found.sureness, found.nodes) == ("slow-network", "likely", ["n2"])
    assert "n1 sends 2.4 MB/s to n2 while it sends" in found.evidence


def test_speeds_are_of_what_was_sent_between_two_looks_to_nodes_of_the_job() -> None:
    before = {"n1": {"10.0.0.2": (1 << 20, 1.0), "10.0.0.9": (0, 0.0), "10.0.0.3": (9 << 20, 1.0)}}
    after = {
        "n1": {"10.0.0.2": (11 << 20, 3.0), "10.0.0.9": (9 << 20, 1.0), "10.0.0.3": (1 << 20, 0.5)}
    }
    addresses = {"10.0.0.2": "n2", "10.0.0.3": "n3"}

    (found,) = speeds_of(before, after, addresses, NODES)
    assert (found.node, found.peer, found.mb_per_s) == ("n1", "n2", 5.243)
