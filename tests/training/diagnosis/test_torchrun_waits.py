# SPDX-License-Identifier: Apache-2.0
"""Torchruns that wait for each other, before any of them has started a rank."""

from __future__ import annotations

import pytest

from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import LAUNCHERS, Frame, Look, NodeReport, RankSample
from tests.support.standstills import found, standstill

NODES = ("n1", "n2", "n3")
WAITS = (
    Frame(
        "site-packages/torch/distributed/elastic/agent/server/api.py",
        500,
        "SimpleElasticAgent._rendezvous",
    ),
)
LONG_S = 600.0


def torchrun(
    task: int, meets: str = "n1:1", *, ran_s: float = 0.0, wakes: float = 0.0
) -> RankSample:
    return RankSample(
        rank=task,
        node=NODES[task],
        program=f"0{LAUNCHERS}",
        pid=100 + task,
        world=len(NODES),
        meets=meets,
        state="S",
        ran_s=2.0 + ran_s,
        wakes=int(wakes),
        stack=WAITS,
    )


@pytest.mark.parametrize(
    ("places", "nodes", "words"),
    [
        (("n1:1", "n1:2", "n1:1"), ["n2"], "torchrun on n2 has another address of the rendezvous"),
        (("n1:1",) * 3, [*NODES], "torchrun on n[1-3] waits in the rendezvous for others"),
    ],
)
def test_a_node_whose_torchrun_goes_elsewhere_is_named_and_no_rank(
    places: tuple[str, ...], nodes: list[str], words: str
) -> None:
    torchruns = (torchrun(task, place) for task, place in enumerate(places))
    diagnosed = found(standstill(*torchruns))

    assert (diagnosed.cause, diagnosed.nodes, diagnosed.ranks) == (
        "rendezvous-never-formed",
        nodes,
        [],
    )
    assert words in diagnosed.description
    assert "rank 1" not in " ".join(diagnosed.evidence)


def hung_after_s(there: int, wakes_per_s: float = 0.0) -> float | None:
    """Return after how many seconds so many torchruns are held for hung, None if never."""
    pulse = Pulse(NODES)

    def reports(now_s: float, look: Look) -> dict[str, NodeReport]:
        wakes = wakes_per_s * now_s
        torchruns = [torchrun(task, wakes=wakes, ran_s=wakes * 1e-4) for task in range(there)]
        return {
            one.node: NodeReport(node=one.node, at_s=now_s, ranks=(one,), look=look)
            for one in torchruns
        }

    now_s = 0.0
    while now_s < LONG_S:
        for report in reports(now_s, Look.SAMPLE).values():
            pulse.observe(report, now_s)
        if program := pulse.due(now_s):
            for look in (Look.BASELINE, Look.INSPECTION):
                now_s += 3.0
                answers = reports(now_s, look)
                for report in answers.values():
                    pulse.observe(report, now_s)
            if not pulse.judge(program, answers, now_s).why_not:
                return now_s
        now_s += 5.0
    return None


@pytest.mark.parametrize("wakes_per_s", [0.0, 130.0])  # blocked, and asking again and again
def test_torchruns_that_are_all_there_and_wait_hang(wakes_per_s: float) -> None:
    after_s = hung_after_s(3, wakes_per_s)
    assert after_s is not None
    assert after_s < 60


def test_a_torchrun_may_wait_for_one_that_is_to_come_and_for_none() -> None:
    assert hung_after_s(2) is None
    assert hung_after_s(1) is None
