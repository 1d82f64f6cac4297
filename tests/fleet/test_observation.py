# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_health.fleet.observation import Observation, Signal, observe
from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    Action,
    ActionDone,
    AgentsLost,
    DevicesWatched,
    LossCause,
    MasterStopped,
    Record,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.journals import run_started

NODES = ["n1", "n2", "n3", "n4"]
UUID = "6b1e0c5a-1111-4222-8333-0123456789ab"


def check(
    *master: Record | tuple[float, Record],
    nodes: dict[str, Sequence[Record]] | None = None,
    post_mortem: Sequence[Record] = (),
    names: Sequence[str] = NODES,
    decided: bool = True,
    **levels: Level,
) -> dict[str, Observation]:
    """Return what a check says of its nodes: healthy, unless a level is given.

    A record may have the second in which it was written; one without is written at once.
    """
    verdict = VerdictReached(
        nodes=[
            NodeVerdict(node=name, level=levels.get(name, Level.HEALTHY), reason="why")
            for name in names
        ]
    )
    records = [run_started(names), *master, *([verdict] if decided else [])]
    timed = [each if isinstance(each, tuple) else (0.0, each) for each in records]
    entries = [Entry(id="", time_s=time_s, kind="", record=record) for time_s, record in timed]
    return {each.node: each for each in observe(entries, nodes or {}, post_mortem)}


def signals(**found: Observation) -> dict[str, tuple[Signal, ...]]:
    return {name: each.signals for name, each in found.items() if each.signals}


@pytest.mark.parametrize(
    ("after", "decided", "blamed"),
    [
        ([(100.03, MasterStopped(reason="SIGTERM"))], False, False),
        ([], False, False),
        ([(180.0, MasterStopped(reason="SIGTERM"))], False, True),
        ([], True, True),
    ],
)
def test_an_agent_that_is_lost_while_its_job_ends_speaks_against_no_node(
    after: list[tuple[float, Record]], decided: bool, blamed: bool
) -> None:
    lost = AgentsLost(launch=0, nodes=["n3"], reason="its agent ended: Terminated")

    found = check((100.0, lost), *after, decided=decided)

    assert ("n3" in signals(**found)) is blamed


def test_verdicts_of_faulty_and_slow_nodes_speak_against_them() -> None:
    found = check(n2=Level.FAULTY)

    assert signals(**found) == {"n2": (Signal.FAULTY,)}
    assert found["n2"].reason == "why"
    assert signals(**check(n3=Level.SLOW)) == {"n3": (Signal.SLOW,)}


def test_what_could_not_be_measured_speaks_against_nobody() -> None:
    assert signals(**check(n2=Level.INCONCLUSIVE)) == {}


def test_what_speaks_against_most_nodes_of_a_job_is_held_against_none() -> None:
    assert signals(**check(n1=Level.FAULTY, n2=Level.FAULTY)) != {}
    assert signals(**check(n1=Level.FAULTY, n2=Level.FAULTY, n3=Level.SLOW)) == {}


def test_a_check_of_one_node_can_speak_against_it() -> None:
    assert signals(**check(names=["n1"], n1=Level.FAULTY)) == {"n1": (Signal.FAULTY,)}


def test_a_lost_agent_speaks_against_its_node_unless_its_journal_was_missing() -> None:
    lost = AgentsLost(launch=0, nodes=["n2"], reason="gone", cause=LossCause.ENDED)
    blind = AgentsLost(launch=0, nodes=["n3"], reason="no file", cause=LossCause.NO_JOURNAL)

    assert signals(**check(lost, blind)) == {"n2": (Signal.LOST,)}


def test_who_the_post_mortem_accuses_is_accused() -> None:
    died = Diagnosed(
        cause="gpu-lost",
        description="",
        attribution="node fault",
        sureness="likely",
        nodes=["n1", "n4"],
        accused=["n4"],
    )

    assert signals(**check(post_mortem=[died])) == {"n4": (Signal.ACCUSED,)}


def test_an_act_is_shown_and_one_that_failed_is_not() -> None:
    drained = ActionDone(action=Action.DRAIN, succeeded=True, nodes=["n2"])
    refused = ActionDone(action=Action.DRAIN, succeeded=False, nodes=["n3"])

    found = check(drained, refused, n2=Level.FAULTY, n3=Level.FAULTY)

    assert found["n2"].signals == (Signal.FAULTY, Signal.LEFT_OUT)
    assert found["n3"].signals == (Signal.FAULTY,)


def test_what_a_gpu_reported_is_kept_by_its_uuid() -> None:
    hot = Burn(
        index=3,
        uuid=f"GPU-{UUID.upper()}",
        bus="",
        samples=9,
        reasons=HARDWARE_THERMAL,
        reason_samples={HARDWARE_THERMAL: 5},
    )
    well = Burn(index=2, uuid="", bus="", samples=9)
    watched = DevicesWatched(node="n2", round=0, devices=[well, hot])

    found = check(nodes={"n2": [watched]})["n2"]

    assert found.signals == (Signal.DEVICE,)
    assert list(found.parts) == [f"GPU-{UUID}"]
    assert "hardware thermal slowdown" in found.parts[f"GPU-{UUID}"]


def test_what_each_device_did_alone_is_kept_by_its_uuid_where_it_is_known() -> None:
    ready = WorkersReady(
        node="n2",
        launch=0,
        store_port=1,
        torch="2.13.0",
        backend="nccl",
        devices=[f"NVIDIA H200 {UUID}", "cpu"],
    )
    sample = Sampled(
        node="n2",
        round=0,
        group=["n2"],
        probe="matmul",
        iteration_ms=[[2.0, 2.0], [4.0, 4.0]],
        flop=8e9,
    )

    found = check(nodes={"n2": [ready, sample]})["n2"]

    assert {part: found.figures[part] for part in found.figures if part} == {
        f"GPU-{UUID}": {"matmul GFLOP/s": 4000.0},
        "device 1": {"matmul GFLOP/s": 2000.0},
    }


def test_names_that_no_node_has_are_left_out() -> None:
    assert set(check(names=["n1", "../n2", "\x1b[2J"])) == {"n1"}


def test_a_check_that_never_began_says_nothing() -> None:
    assert observe([], {}, []) == []
