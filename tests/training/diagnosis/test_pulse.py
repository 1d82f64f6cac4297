# SPDX-License-Identifier: Apache-2.0
"""Simulated trainings, sample by sample: when they are due for an inspection, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.training.diagnosis.collected import NodeState
from slurm_health.training.diagnosis.pulse import LIMITS, Pulse
from slurm_health.training.diagnosis.samples import (
    Frame,
    Look,
    NodeReport,
    RankSample,
    Standstill,
)
from tests.support.rows import rows

TORCH = "/venv/lib/python3.11/site-packages/torch"
TRAIN = Frame("/home/a/train.py", 70, "main")
STACKS: dict[str, tuple[Frame, ...]] = {
    name: (TRAIN, Frame(place, 900, function))
    for name, place, function in (
        ("collective", f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"),
        ("rendezvous", f"{TORCH}/distributed/rendezvous.py", "_create_c10d_store"),
        ("loader", f"{TORCH}/utils/data/dataloader.py", "__next__"),
        ("checkpoint", f"{TORCH}/serialization.py", "save"),
        ("own code", "/home/a/augment.py", "wait_for_flag"),
        ("compiles", f"{TORCH}/_inductor/compile_fx.py", "compile"),
        ("pdb", "/usr/lib/python3.11/pdb.py", "interaction"),
    )
}
_AGENT = f"{TORCH}/distributed/elastic/agent/server/api.py"
STACKS["torchrun"] = (Frame(_AGENT, 500, "SimpleElasticAgent._rendezvous"),)
RANKS = 3
NODES = [f"n{rank + 1}" for rank in range(RANKS)]
EVERY_S = 5.0
BEGAN_S = 1000.0
INSPECTION_S = 6.0


# What a main thread that works, and one that only waits, adds to its counters in a second.
WORKS = {"ran_s": 0.4, "cpu_s": 0.4, "wakes": 50.0}
COUNTERS = {"ran_s": 0.0, "cpu_s": 0.0, "unserved_s": 0.0, "wakes": 0.0, "io_bytes": 0.0}


@dataclass
class Training:
    """A training that steps until it stops at `ends_s`.

    Args:
        then: what an inspection shows of its ranks after that, and what they add to their counters
            in a second; `of_last` is what the last rank shows instead.
        beats: its ranks have a heartbeat.
        began: they had run for so long before.
        bursts_s: so long after `ends_s` a child of the last rank works for a moment.
    """

    ends_s: float
    step_s: float = 0.5
    beats: bool = True
    then: dict[str, Any] = field(default_factory=lambda: {"stack": "collective"})
    of_last: dict[str, Any] = field(default_factory=dict)
    ranks: int = RANKS
    ran_s: float = 20.0
    bursts_s: Sequence[float] = ()
    program: str = "0"

    def reports(self, now_s: float, look: Look = Look.SAMPLE) -> dict[str, NodeReport]:
        """Return what agents send at a time."""
        trained_s = min(now_s, self.ends_s) - BEGAN_S
        steps = int(trained_s / self.step_s) if self.beats else 0
        idle_s = max(0.0, now_s - self.ends_s)
        reports = {}
        for rank in range(self.ranks):
            is_last = rank == self.ranks - 1
            shown = {**self.then, **(self.of_last if is_last else {})}
            rates = {name: shown.pop(name, 0.0) for name in COUNTERS}
            bursts = sum(at_s <= idle_s for at_s in self.bursts_s) if is_last else 0
            count = {
                name: trained_s * WORKS.get(name, 0.0) + idle_s * rate
                for name, rate in rates.items()
            }
            count["ran_s"] += self.ran_s
            count["cpu_s"] += self.ran_s + 2.0 * bursts
            sample = RankSample(
                rank=rank,
                node=NODES[rank],
                program=self.program,
                pid=100 + rank,
                world=RANKS,
                state="S",
                step=steps,
                steps=steps,
                age_s=now_s - (BEGAN_S + steps * self.step_s) if steps else 0.0,
                typical_s=self.step_s if self.beats else 0.0,
                longest_s=shown.pop("longest_s", self.step_s) if self.beats else 0.0,
                ran_s=count["ran_s"],
                cpu_s=count["cpu_s"],
                unserved_s=count["unserved_s"],
                wakes=int(count["wakes"]),
                io_bytes=int(count["io_bytes"]),
            )
            if look is not Look.SAMPLE:
                stack = STACKS.get(shown.pop("stack", ""), ())
                sample = msgspec.structs.replace(sample, stack=stack, **shown)
            reports[NODES[rank]] = NodeReport(
                node=NODES[rank],
                at_s=now_s,
                ranks=(sample,),
                look=look,
                addresses=(f"10.0.0.{rank}",),
            )
        return reports


def observe(pulse: Pulse, training: Training, now_s: float) -> None:
    for report in training.reports(now_s).values():
        pulse.observe(report, now_s)


def inspect(
    pulse: Pulse, training: Training, now_s: float, received: int = 0, **more: Any
) -> Standstill:
    """Return the verdict of an inspection that ends at a time."""
    (program,) = pulse.programs.values()
    for look, at_s in ((Look.BASELINE, now_s - 4.0), (Look.INSPECTION, now_s)):
        reports = training.reports(at_s, look)
        for node in more.get("silent", ()):
            del reports[node]
        for node, report in reports.items():
            broken = more.get("broken", {}).get(node, ())
            came = 100 + (received if look is Look.INSPECTION else 0)
            reports[node] = msgspec.structs.replace(report, broken=broken, received=came)
            pulse.observe(reports[node], at_s)
    verdict = pulse.judge(program, reports, now_s, more.get("silent", ()))
    for report in training.reports(now_s, Look.BASELINE).values():
        pulse.observe(report, now_s)
    return verdict


def watched(
    training: Training, until_s: float, pulse: Pulse | None = None, **more: Any
) -> tuple[float | None, list[Standstill]]:
    """Watch until a hang; return how long after its end that was, and each inspection's verdict."""
    pulse = pulse or Pulse(NODES)
    verdicts: list[Standstill] = []
    now_s = BEGAN_S
    while now_s < until_s:
        observe(pulse, training, now_s)
        if pulse.due(now_s) is not None:
            now_s += INSPECTION_S
            verdicts.append(inspect(pulse, training, now_s, **more))
            if not verdicts[-1].why_not:
                return now_s - training.ends_s, verdicts
        now_s += EVERY_S
    return None, verdicts


FIRST, LONG = BEGAN_S + 0.4, BEGAN_S + 600.0


@rows
def test_what_hangs_is_due_and_said_in_time(
    training: Training, within_s: float, after_s: float
) -> None:
    took_s, verdicts = watched(training, training.ends_s + 600)

    assert took_s is not None
    assert after_s <= took_s <= within_s
    assert verdicts[-1].stalled_s >= verdicts[-1].allowance_s


@rows
def test_what_may_go_on_is_no_hang_for_minutes(training: Training, why: str) -> None:
    after_s, verdicts = watched(training, training.ends_s + 600)

    assert after_s is None
    assert why in verdicts[-1].why_not


def test_lines_of_output_have_a_pace_where_main_threads_hardly_run() -> None:
    """MPI's ranks spin: they seem to rest from their first step on."""
    training, pulse = Training(FIRST, beats=False, of_last={"stack": "own code"}), Pulse(NODES)
    for step in range(90):
        observe(pulse, training, FIRST + step)
        pulse.read("out", f"step {step}\n", FIRST + step)
    assert "its start" in inspect(pulse, training, FIRST + 90 + LIMITS.runs_s).why_not

    verdict = inspect(pulse, training, FIRST + 90 + LIMITS.lines_s)
    assert (verdict.why_not, verdict.line) == ("", "step 89")


def test_a_training_whose_main_threads_hardly_run_any_more_goes_on_by_its_lines() -> None:
    training, pulse = Training(LONG, beats=False, of_last={"stack": "own code"}), Pulse(NODES)
    for step in range(900):
        now_s = BEGAN_S + step
        observe(pulse, training, now_s)
        pulse.read("out", f"step {step} loss 0.5\n", now_s)

    assert inspect(pulse, training, now_s + INSPECTION_S).why_not


def test_a_wait_for_a_server_is_a_pause_for_a_while_whatever_its_state() -> None:
    awaited = "/ckpt/a.pt (srv:/ckpt)"
    waits = {"state": "S", "stack": "own code", "storage": awaited}
    after_s, verdicts = watched(Training(LONG, of_last=waits), LONG + 600)

    assert f"waits for storage, {awaited}" in verdicts[0].why_not
    assert after_s is not None
    assert LIMITS.storage_s <= after_s <= LIMITS.storage_s + 30


@rows
def test_what_goes_on_or_never_began_is_not_looked_at(training: Training) -> None:
    assert watched(training, BEGAN_S + 7200) == (None, [])


def test_a_service_that_is_quiet_for_days_is_looked_at_less_and_less_often() -> None:
    after_s, verdicts = watched(Training(LONG, beats=False, then={"stack": ""}), LONG + 86400.0)

    assert after_s is None
    assert len(verdicts) < 160


SLOW_ONCE = {"stack": "collective", "longest_s": 300.0}


@pytest.mark.parametrize(
    ("training", "observed", "quiet_s", "due_s"),
    [
        # It was suspended for an hour.
        (Training(LONG), (-5.0, 0.0, 3600.0, 3605.0), 3620.0, 3630.0),
        # Its agent was started again after 40 s.
        (Training(LONG, beats=False), (*range(-600, 5, 5), 40.0), 39.0, 41.0),
        # A pause as long as one before is usual.
        (Training(LONG, then=SLOW_ONCE), (0.0,), 440.0, 460.0),
    ],
)
def test_a_rest_counts_from_its_own_beginning_and_by_what_is_usual(
    training: Training, observed: Sequence[float], quiet_s: float, due_s: float
) -> None:
    pulse = Pulse(NODES)
    for after_s in observed:
        observe(pulse, training, LONG + after_s)

    assert pulse.due(LONG + quiet_s) is None
    assert pulse.due(LONG + due_s) is not None


def test_a_stillness_that_ended_by_itself_is_usual_for_a_start() -> None:
    pulse, verdicts = Pulse(NODES), {}
    training = Training(FIRST, beats=False, then={"stack": "rendezvous"}, bursts_s=[100.0])
    for at_s in range(0, 300, 5):
        observe(pulse, training, FIRST + at_s)
        verdicts[at_s] = inspect(pulse, training, FIRST + at_s + 4.5).why_not

    assert "its start" in verdicts[240]
    assert verdicts[255] == ""


def test_data_that_comes_over_the_network_moves_a_start() -> None:
    training, pulse = Training(FIRST, beats=False, then={"stack": "rendezvous"}), Pulse(NODES)
    for now_s in range(int(BEGAN_S), int(FIRST) + 60, 5):
        observe(pulse, training, float(now_s))

    verdict = inspect(pulse, training, FIRST + 65.0, received=1 << 20)
    assert "its start" in verdict.why_not


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.0.9.9"])
def test_data_that_is_not_answered_within_the_job_is_no_start_and_from_outside_may_be(
    peer: str,
) -> None:
    training = Training(FIRST, beats=False, then={"stack": "own code"})
    after_s, verdicts = watched(training, FIRST + 300, broken={"n1": ((peer, 6),)})

    assert (after_s is not None) == (peer == "10.0.0.1")
    assert verdicts[-1].paths[0].peer == ("n2" if after_s else peer)


def test_a_rank_that_has_ended_while_others_wait_is_gone_and_one_that_was_never_there_too() -> None:
    training, pulse = Training(LONG, ranks=2), Pulse(NODES)
    observe(pulse, Training(LONG), LONG)
    pulse.observe(NodeReport(node="n3", at_s=LONG + 5.0), LONG + 5.0)
    _, verdicts = watched(training, LONG + 300, pulse)
    (gone,) = [rank for rank in verdicts[-1].ranks if rank.gone]
    assert (gone.rank, gone.node, gone.pid) == (2, "n3", 102)

    _, verdicts = watched(training, LONG + 300)
    (gone,) = [rank for rank in verdicts[-1].ranks if rank.gone]
    assert (gone.rank, gone.node, gone.pid) == (2, "n3", 0)


@pytest.mark.parametrize("answer", [{"reached": ()}, {"state": NodeState(node="n1")}])
def test_an_answer_without_ranks_ends_none(answer: dict[str, Any]) -> None:
    training, pulse = Training(LONG), Pulse(NODES)
    observe(pulse, training, LONG)
    for node in NODES:
        pulse.observe(NodeReport(node=node, **answer), LONG + 1.0)
    (program,) = pulse.programs.values()

    assert not any(sample.gone for sample in program.samples)


def test_a_hang_is_said_once_and_once_that_it_is_over() -> None:
    training, pulse = Training(LONG), Pulse(NODES)
    after_s, _ = watched(training, LONG + 300, pulse)
    assert after_s is not None
    assert watched(training, LONG + 900, pulse) == (None, [])
    assert pulse.resumed(LONG + 900) == []
    training.ends_s = LONG + 2000
    for now_s in (LONG + 1000, LONG + 1005):
        observe(pulse, training, now_s)

    (resumed,) = pulse.resumed(LONG + 1005)
    assert resumed.stalled_s == pytest.approx(1005, abs=1)
    assert pulse.resumed(LONG + 1006) == []


@rows
def test_lines_that_stay_away_tell_of_a_hang_where_ranks_are_known_to_wait(
    then: dict[str, Any], hangs: bool
) -> None:
    training, pulse = Training(LONG, beats=False, then=then), Pulse(NODES)
    for now_s in range(int(BEGAN_S), int(LONG) + 1, 10):
        lines = (f"step {now_s - 1000 + n} loss 0.5\n" for n in range(10))
        pulse.read("out", "".join(lines), float(now_s))
    after_s, verdicts = watched(training, LONG + 300, pulse)

    assert (after_s is not None) == hangs
    assert verdicts
    assert verdicts[-1].line.startswith("step 609")
    assert verdicts[-1].step == 609


def test_limits_that_are_scaled_together_say_the_same_sooner() -> None:
    scaled = LIMITS.scaled(0.2)

    assert (scaled.at_least_s, scaled.suspended_s, scaled.times) == (5.0, 12.0, LIMITS.times)
    training = Training(LONG, of_last={"stack": "loader"})
    after_s, _ = watched(training, LONG + 600, Pulse(NODES, scaled))
    assert after_s is not None
    assert after_s < 20


def test_a_rank_that_is_elsewhere_at_the_second_look_does_not_rest() -> None:
    loads, waits = (
        RankSample(rank=0, pid=7, stack=stack) for stack in (STACKS["loader"], STACKS["collective"])
    )

    assert waits.since(waits, 4.0).rests
    assert not waits.since(loads, 4.0).rests


def test_a_rank_that_is_ready_to_run_and_does_not_lacks_a_processor() -> None:
    ready = RankSample(rank=0, pid=7, state="R")

    assert not ready.since(ready, 4.0).rests
    assert ready.since(ready, 4.0).lacks_processor


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
