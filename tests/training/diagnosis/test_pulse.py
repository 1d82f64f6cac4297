# SPDX-License-Identifier: Apache-2.0
"""Simulated trainings, sample by sample: when they are due for an inspection, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.training.diagnosis.pulse import LIMITS, Pulse
from slurm_health.training.diagnosis.samples import (
    Frame,
    NodeReport,
    RankSample,
    Standstill,
    merge,
)

TORCH = "/venv/lib/python3.11/site-packages/torch"
TRAIN = Frame("/home/a/train.py", 70, "main")
COLLECTIVE = (TRAIN, Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"))
RENDEZVOUS = (TRAIN, Frame(f"{TORCH}/distributed/rendezvous.py", 180, "_create_c10d_store"))
LOADER = (TRAIN, Frame(f"{TORCH}/utils/data/dataloader.py", 700, "__next__"))
CHECKPOINT = (TRAIN, Frame(f"{TORCH}/serialization.py", 900, "save"))
OWN_CODE = (TRAIN, Frame("/home/a/augment.py", 12, "wait_for_flag"))
PDB = (TRAIN, Frame("/usr/lib/python3.11/pdb.py", 9, "interaction"))
RANKS = 3
NODES = [f"n{rank + 1}" for rank in range(RANKS)]
EVERY_S = 5.0
BEGAN_S = 1000.0
INSPECTION_S = 6.0


@dataclass
class Training:
    """A training that steps until it stops at `ends_s`; what its ranks show then is `then`.

    `of_last` is what the last rank shows instead. `beats`: its ranks have a heartbeat.
    """

    ends_s: float
    step_s: float = 0.5
    beats: bool = True
    then: dict[str, Any] = field(default_factory=lambda: {"stack": COLLECTIVE})
    of_last: dict[str, Any] = field(default_factory=dict)
    ranks: int = RANKS
    ran_s: float = 20.0

    def reports(self, now_s: float, *, inspected: bool = False) -> dict[str, NodeReport]:
        """Return what agents send at a time."""
        trained_s = min(now_s, self.ends_s) - BEGAN_S
        steps = int(trained_s / self.step_s) if self.beats else 0
        still_s = max(0.0, now_s - self.ends_s)
        reports = {}
        for rank in range(self.ranks):
            sample = RankSample(
                rank=rank,
                node=NODES[rank],
                program="0",
                pid=100 + rank,
                world=RANKS,
                state="S",
                step=steps,
                steps=steps,
                age_s=now_s - (BEGAN_S + steps * self.step_s) if steps else 0.0,
                typical_s=self.step_s if self.beats else 0.0,
                longest_s=self.step_s if self.beats else 0.0,
                ran_s=self.ran_s,
                rest_s=still_s,
                still_s=still_s,
                moves=int(trained_s / EVERY_S),
                rests=still_s > 0,
            )
            shown = dict(self.then)
            if rank == self.ranks - 1:
                shown |= self.of_last
            always = {
                name: v for name, v in shown.items() if name in {"still_s", "rest_s", "rests"}
            }
            sample = msgspec.structs.replace(sample, **(shown if inspected else always))
            reports[NODES[rank]] = NodeReport(
                node=NODES[rank], ranks=(sample,), inspected=inspected
            )
        return reports


def watched(
    training: Training, until_s: float, pulse: Pulse | None = None, **more: Any
) -> tuple[float | None, list[Standstill]]:
    """Watch until a hang; return how long after its end that was, and each inspection's verdict."""
    pulse = pulse or Pulse(NODES)
    verdicts: list[Standstill] = []
    now_s = BEGAN_S
    while now_s < until_s:
        for report in training.reports(now_s).values():
            pulse.observe(report, now_s)
        program = pulse.due(now_s)
        if program is not None:
            now_s += INSPECTION_S
            reports = training.reports(now_s, inspected=True)
            for report in reports.values():
                pulse.observe(report, now_s)
            silent = more.get("silent", ())
            kept = {node: r for node, r in reports.items() if node not in silent}
            broken = more.get("broken", {})
            for node, paths in broken.items():
                kept[node] = msgspec.structs.replace(kept[node], broken=paths)
            for node in kept:
                addresses = (f"10.0.0.{NODES.index(node)}",)
                kept[node] = msgspec.structs.replace(kept[node], addresses=addresses)
            verdicts.append(pulse.judge(program, kept, now_s, silent))
            if not verdicts[-1].why_not:
                return now_s - training.ends_s, verdicts
        now_s += EVERY_S
    return None, verdicts


FIRST, TWENTIETH, LONG = BEGAN_S + 0.4, BEGAN_S + 10.0, BEGAN_S + 600.0


@pytest.mark.parametrize(
    ("training", "within_s"),
    [
        (Training(TWENTIETH, of_last={"state": "T", "stack": ()}), 45),
        (Training(FIRST, beats=False, of_last={"state": "T", "stack": ()}), 45),
        (Training(TWENTIETH, beats=False, of_last={"state": "T", "stack": ()}), 45),
        (Training(FIRST, beats=False, then={"stack": RENDEZVOUS}), 45),
        (Training(TWENTIETH), 45),
        (Training(LONG, of_last={"stack": LOADER}), 45),
        (Training(LONG, beats=False, of_last={"stack": LOADER}), 60),
        (Training(TWENTIETH, beats=False, of_last={"stack": LOADER}), 90),
        (Training(LONG, of_last={"stack": OWN_CODE}), 45),
        (Training(LONG, beats=False, of_last={"stack": OWN_CODE}), 60),
        (Training(LONG, of_last={"state": "D", "stack": LOADER}), 60),
        (Training(LONG, of_last={"state": "D", "stack": CHECKPOINT}), 150),
        (Training(LONG, then={"stack": COLLECTIVE, "polls": True}), 45),
        (Training(LONG, beats=False, then={"stack": COLLECTIVE, "polls": True}), 60),
        (Training(LONG, beats=False, then={"gpu_waits": True, "cpu_share": 1.0}), 60),
    ],
)
def test_what_hangs_is_due_and_said_in_time(training: Training, within_s: float) -> None:
    after_s, verdicts = watched(training, training.ends_s + 600)

    assert after_s is not None
    assert after_s <= within_s
    assert verdicts[-1].stalled_s >= verdicts[-1].allowance_s


@pytest.mark.parametrize(
    ("training", "why"),
    [
        (Training(LONG, of_last={"state": "t"}), "held by a debugger"),
        (Training(LONG, of_last={"stack": PDB}), "held by a debugger"),
        (Training(LONG, of_last={"stack": OWN_CODE, "cpu_share": 0.9}), "still works"),
        (Training(LONG, of_last={"stack": OWN_CODE, "gpu_share": 0.9}), "still works"),
        (Training(LONG, of_last={"stack": OWN_CODE, "unserved_share": 0.8}), "has no processor"),
        (Training(LONG, of_last={"stack": CHECKPOINT, "moved_bytes": 1 << 20}), "still works"),
        (Training(LONG, beats=False, then={"stack": ()}), "known to wait"),
        (Training(LONG, beats=False, then={"stack": OWN_CODE}), "known to wait"),
        (Training(LONG, beats=False, of_last={"rests": False}), "still runs"),
        (Training(LONG, beats=False, of_last={"stack": OWN_CODE, "polls": True}), "polls"),
        # Starts: compilation in a child, a rank that waits for a file, one that is to come.
        (Training(FIRST, of_last={"stack": OWN_CODE, "still_s": 0.0}), "its start"),
        (Training(FIRST, beats=False, of_last={"stack": OWN_CODE}), "its start"),
        (Training(FIRST, beats=False, then={"stack": RENDEZVOUS}, ranks=2), "its start"),
    ],
)
def test_what_may_go_on_is_no_hang_for_minutes(training: Training, why: str) -> None:
    after_s, verdicts = watched(training, training.ends_s + 600)

    assert after_s is None
    assert why in verdicts[-1].why_not


@pytest.mark.parametrize(
    "training",
    [
        Training(BEGAN_S + 86400.0),
        Training(BEGAN_S + 86400.0, beats=False),
        Training(FIRST, beats=False, ran_s=0.1, then={"stack": ()}),  # `sleep`, a shell
    ],
    ids=["steps", "runs", "has not begun"],
)
def test_what_goes_on_or_never_began_is_not_looked_at(training: Training) -> None:
    assert watched(training, BEGAN_S + 7200) == (None, [])


def test_a_service_that_is_quiet_for_days_is_looked_at_less_and_less_often() -> None:
    after_s, verdicts = watched(Training(LONG, beats=False, then={"stack": ()}), LONG + 86400.0)

    assert after_s is None
    assert len(verdicts) < 160


def test_an_agent_that_was_started_again_changes_nothing_about_a_rest() -> None:
    training, pulse = Training(LONG, beats=False), Pulse(NODES)
    for now_s in range(int(BEGAN_S), int(LONG) + 30, 5):
        for report in training.reports(float(now_s)).values():
            pulse.observe(report, float(now_s))
    training.then = {"stack": COLLECTIVE, "moves": 0, "rest_s": 0.0, "still_s": 0.0}
    for report in training.reports(LONG + 30, inspected=True).values():
        pulse.observe(report, LONG + 30)

    assert pulse.due(LONG + 39) is None
    assert pulse.due(LONG + 41) is not None


def test_a_pause_as_long_as_one_before_is_usual() -> None:
    shown = {"stack": COLLECTIVE, "longest_s": 300.0}
    training = Training(LONG, then=shown)
    pulse = Pulse(NODES)
    for report in training.reports(LONG, inspected=True).values():
        pulse.observe(report, LONG)

    assert pulse.due(LONG + 440.0) is None
    assert pulse.due(LONG + 460.0) is not None


def test_a_stillness_that_ended_by_itself_is_usual_for_a_start() -> None:
    pulse, verdicts = Pulse(NODES), {}
    for at_s in range(0, 300, 5):  # something moves 100 s after the beginning, and not again
        still_s = float(at_s if at_s < 100 else at_s - 100)
        then = {"stack": RENDEZVOUS, "still_s": still_s, "rest_s": still_s, "moves": 1}
        training, now_s = Training(BEGAN_S, beats=False, then=then), BEGAN_S + at_s
        reports = training.reports(now_s, inspected=True)
        for report in reports.values():
            pulse.observe(report, now_s)
        (program,) = pulse.programs.values()
        verdicts[at_s] = pulse.judge(program, reports, now_s).why_not

    assert "its start" in verdicts[240]
    assert verdicts[255] == ""


def test_data_that_comes_over_the_network_moves_a_start() -> None:
    training, pulse = Training(FIRST, beats=False, then={"stack": RENDEZVOUS}), Pulse(NODES)
    for now_s in (FIRST, FIRST + 60.0):
        reports = training.reports(now_s, inspected=True)
        for node, report in reports.items():
            reports[node] = msgspec.structs.replace(report, window_s=4.0, came_bytes=1 << 20)
            pulse.observe(report, now_s)
    (program,) = pulse.programs.values()

    assert "its start" in pulse.judge(program, reports, FIRST + 60.0).why_not


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.0.9.9"])
def test_data_that_is_not_answered_within_the_job_is_no_start_and_from_outside_may_be(
    peer: str,
) -> None:
    training = Training(FIRST, beats=False, then={"stack": OWN_CODE})
    after_s, verdicts = watched(training, FIRST + 300, broken={"n1": ((peer, 6),)})

    assert (after_s is not None) == (peer == "10.0.0.1")
    assert verdicts[-1].paths[0].peer == ("n2" if after_s else peer)


def test_a_rank_that_has_ended_while_others_wait_is_gone_and_one_that_was_never_there_too() -> None:
    training, pulse = Training(LONG, ranks=2), Pulse(NODES)
    for report in Training(LONG).reports(LONG).values():
        pulse.observe(report, LONG)
    pulse.observe(NodeReport(node="n3"), LONG + 5.0)
    _, verdicts = watched(training, LONG + 300, pulse)
    (gone,) = [rank for rank in verdicts[-1].ranks if rank.gone]
    assert (gone.rank, gone.node, gone.pid) == (2, "n3", 102)

    _, verdicts = watched(training, LONG + 300)
    (gone,) = [rank for rank in verdicts[-1].ranks if rank.gone]
    assert (gone.rank, gone.node, gone.pid) == (2, "n3", 0)


def test_a_hang_is_said_once_and_once_that_it_is_over() -> None:
    training, pulse = Training(LONG), Pulse(NODES)
    after_s, _ = watched(training, LONG + 300, pulse)
    assert after_s is not None
    assert watched(training, LONG + 900, pulse) == (None, [])
    assert pulse.resumed(LONG + 900) == []
    training.ends_s = LONG + 2000
    for now_s in (LONG + 1000, LONG + 1005):
        for report in training.reports(now_s).values():
            pulse.observe(report, now_s)

    (resumed,) = pulse.resumed(LONG + 1005)
    assert resumed.stalled_s == pytest.approx(1005, abs=1)
    assert pulse.resumed(LONG + 1006) == []


def output(pulse: Pulse, until_s: float) -> None:
    now_s = BEGAN_S
    while now_s <= until_s:
        lines = (f"step {int(now_s) - 1000 + n} loss 0.5\n" for n in range(10))
        pulse.read("out", "".join(lines), now_s)
        now_s += 10.0


@pytest.mark.parametrize(
    ("then", "hangs"),
    [
        ({"stack": COLLECTIVE, "cpu_share": 0.3, "rest_s": 0.0}, True),
        ({"stack": (), "kernel": "pipe_read", "rest_s": 0.0}, True),
        ({"stack": (), "kernel": "ep_poll", "rest_s": 0.0}, False),
        ({"stack": OWN_CODE, "cpu_share": 0.3, "rest_s": 0.0}, False),
    ],
    ids=["polls in a collective", "waits for a pipe", "serves", "works"],
)
def test_lines_that_stay_away_tell_of_a_hang_where_ranks_are_known_to_wait(
    then: dict[str, Any], hangs: bool
) -> None:
    training, pulse = Training(LONG, beats=False, then=then), Pulse(NODES)
    output(pulse, LONG)
    after_s, verdicts = watched(training, LONG + 300, pulse)

    assert (after_s is not None) == hangs
    assert verdicts
    assert verdicts[-1].line.startswith("step 609")
    assert verdicts[-1].step == 609


def test_limits_that_are_scaled_together_say_the_same_sooner() -> None:
    scaled = LIMITS.scaled(0.2)

    assert (scaled.at_least_s, scaled.times) == (5.0, LIMITS.times)
    training = Training(LONG, of_last={"stack": LOADER})
    after_s, _ = watched(training, LONG + 600, Pulse(NODES, scaled))
    assert after_s is not None
    assert after_s < 20


@pytest.mark.parametrize(
    ("ran_s", "wakes", "moved_bytes", "expected"),
    [
        (0.0, 1, 0, "rests"),
        (0.1, 400, 0, "polls"),
        (4.0, 0, 0, "rests"),  # spins
        (1.0, 40, 0, "runs"),
        (4.0, 400, 0, "runs"),
        (0.0, 1, 1 << 20, "runs"),
    ],
)
def test_a_main_thread_rests_polls_or_runs(
    ran_s: float, wakes: int, moved_bytes: int, expected: str
) -> None:
    before = RankSample(rank=0, pid=7, ran_s=10.0, wakes=100)
    after = RankSample(rank=0, pid=7, ran_s=10.0 + ran_s, wakes=100 + wakes, io_bytes=moved_bytes)
    sample = after.since(before, 4.0)

    assert "polls" * sample.polls or "rests" * sample.rests or expected == "runs"
    assert (sample.polls, sample.rests) == (expected == "polls", expected in {"rests", "polls"})


def test_a_rank_that_is_elsewhere_at_the_second_look_does_not_rest() -> None:
    def look(stack: tuple[Frame, ...]) -> NodeReport:
        return NodeReport(node="n1", ranks=(RankSample(rank=0, pid=7, stack=stack),), received=5)

    (same,) = merge(look(COLLECTIVE), look(COLLECTIVE), 4.0).ranks
    (other,) = merge(look(LOADER), look(COLLECTIVE), 4.0).ranks
    assert (same.rests, other.rests) == (True, False)


@pytest.mark.heavy
@given(
    step_s=st.sampled_from([0.1, 1.0, 20.0]),
    pauses=st.lists(st.floats(1.0, 20.0), max_size=12),
    beats=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_hours_of_steps_with_short_pauses_have_no_hang(
    step_s: float, pauses: list[float], beats: bool
) -> None:
    pulse, now_s = Pulse(NODES), BEGAN_S
    for pause_s in pauses:
        training = Training(now_s + 300, step_s, beats)
        after_s, _ = watched(training, training.ends_s + pause_s, pulse)
        assert after_s is None
