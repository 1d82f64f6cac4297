# SPDX-License-Identifier: Apache-2.0
"""Torchruns that wait for each other, before any of them has started a rank."""

import pytest

from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import LAUNCHERS, RankSample, Standstill
from tests.frozen.trainings import diagnosed
from tests.support.rows import rows
from tests.training.diagnosis.test_pulse import FIRST, NODES, STACKS, Training, observe, watched

PROGRAM = f"0{LAUNCHERS}"


@pytest.mark.parametrize(
    ("places", "nodes", "words"),
    [
        (("n1:1", "n1:2", "n1:1"), ["n2"], "torchrun on n2 has another address of the rendezvous"),
        (("n1:1",) * 3, NODES, "torchrun on n[1-3] waits in the rendezvous for others"),
    ],
)
def test_a_node_whose_torchrun_goes_elsewhere_is_named_and_no_rank(
    places: tuple[str, ...], nodes: list[str], words: str
) -> None:
    ranks = tuple(
        RankSample(
            rank=task,
            node=node,
            program=PROGRAM,
            pid=100 + task,
            world=len(NODES),
            meets=place,
            state="S",
            stack=STACKS["torchrun"],
        )
        for task, (node, place) in enumerate(zip(NODES, places, strict=True))
    )
    hang = Standstill(stalled_s=40.0, allowance_s=25.0, step=12, nodes=tuple(NODES), ranks=ranks)
    cause = diagnosed("hang", [hang])

    assert cause is not None
    assert (cause.cause, cause.nodes, cause.ranks) == ("rendezvous-never-formed", nodes, [])
    assert words in cause.description
    assert "rank 1" not in " ".join(cause.evidence)


@rows
def test_torchruns_that_wait_hang_once_all_of_them_are_there(
    count: int, wakes_per_s: float, hang: bool
) -> None:
    waits = {"stack": "torchrun", "wakes": wakes_per_s, "ran_s": wakes_per_s * 1e-4}
    torchruns = Training(FIRST, beats=False, then=waits, ranks=count, program=PROGRAM)
    after_s, _ = watched(torchruns, FIRST + 600)

    assert (after_s is not None and after_s < 75) == hang


@pytest.mark.parametrize(("follows", "stalled_s"), [("0", [100.0]), ("1", [])])
def test_torchruns_that_start_their_ranks_after_a_hang_go_on(
    follows: str, stalled_s: list[float]
) -> None:
    torchruns = Training(FIRST, beats=False, then={"stack": "torchrun"}, program=PROGRAM)
    pulse = Pulse(NODES)
    watched(torchruns, FIRST + 90, pulse)
    observe(pulse, Training(FIRST + 200, program=follows), FIRST + 100)

    resumed = pulse.resumed(FIRST + 100)
    assert [round(each.stalled_s) for each in resumed] == stalled_s
    assert pulse.resumed(FIRST + 105) == []
