# SPDX-License-Identifier: Apache-2.0
"""What is concluded of nodes whose processes crash, fail or say nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from tests.preflight.localize.test_localizer import Answer, cluster, level, names, run


def spoiled_by(
    node: str, *, outcome: Outcome = Outcome.FAILED, until: int = 99, **how: object
) -> Answer:
    """Answer as well nodes do, but for the groups of one node in the first rounds."""
    healthy = cluster()

    def answer(index: int, group: tuple[str, ...]) -> GroupResult:
        if node in group and index < until:
            return structs.replace(GroupResult(nodes=group, outcome=outcome), **how)
        return healthy(index, group)

    return answer


@pytest.mark.parametrize("count", [2, 3, 4, 16])
@pytest.mark.parametrize(("crashing", "needed"), [((0, 1), 2), ((0, 2), 3)])
def test_a_node_that_crashes_alone_twice_is_faulty_and_no_further_round_is_run(
    count: int, crashing: tuple[int, ...], needed: int
) -> None:
    loc = Localizer(names(count), settings=LocalizeSettings(alone=True, min_rounds=1, max_rounds=3))
    answer = cluster()
    rounds = 0
    while (planned := loc.next_round()) is not None:
        rounds += 1
        results = [answer(planned.index, group) for group in planned.groups]
        loc.observe(
            planned.index,
            [
                structs.replace(result, outcome=Outcome.FAILED, crashed=("n2",))
                if result.nodes == ("n2",) and planned.index in crashing
                else result
                for result in results
            ],
        )

    assert rounds == needed
    assert loc.verdict().named(Level.FAULTY) == ("n2",)
    assert len(loc.verdict().named(Level.HEALTHY)) == count - 1


@pytest.mark.parametrize("failing", [{0, 2}, {0, 2, 4}, {0, 2, 4, 6}, {0, 1, 2, 3, 4}])
def test_two_nodes_that_fail_together_now_and_then_are_in_doubt(failing: set[int]) -> None:
    well = cluster()

    def answer(index: int, group: tuple[str, ...]) -> GroupResult:
        bad = GroupResult(nodes=group, outcome=Outcome.TIMED_OUT)
        return bad if index in failing else well(index, group)

    verdict, _ = run(names(2), answer)

    assert {level(verdict, node) for node in names(2)} == {Level.INCONCLUSIVE}
    assert "no allgather with n2 (timed out)" in verdict.nodes["n1"].reason


def test_what_a_node_said_of_its_failures_stands_in_the_verdict() -> None:
    died = "check process of device 0 died: killed by SIGKILL"

    verdict, _ = run(names(3), spoiled_by("n2", said={"n2": died}))

    assert verdict.nodes["n2"].reason.endswith(f"(failed): {died}")


def test_where_only_its_partners_said_something_that_stands_in_the_verdict() -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        said = {node: "received other data than rank 1 sent" for node in group if node != "n2"}
        failed = GroupResult(nodes=group, outcome=Outcome.FAILED, said=said)
        well = GroupResult(nodes=group, outcome=Outcome.MEASURED, shared_ms={"allgather": 5.0})
        return failed if "n2" in group else well

    verdict, _ = run(names(3), answer)

    assert "(failed); n" in verdict.nodes["n2"].reason
    assert "reported: received other data than rank 1 sent" in verdict.nodes["n2"].reason


def test_an_undecided_pair_says_what_it_reported() -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        return GroupResult(nodes=group, outcome=Outcome.FAILED, said={"n1": "no route to host"})

    verdict, _ = run(names(2), answer)

    assert verdict.nodes["n1"].reason.endswith("identify the faulty node: no route to host")
    assert verdict.nodes["n2"].reason.endswith("; n1 reported: no route to host")


def test_a_node_that_is_silent_twice_is_left_alone_and_its_partners_are_healthy() -> None:
    silent = spoiled_by("n2", outcome=Outcome.TIMED_OUT, silent=("n2",))

    verdict, rounds = run(names(4), silent)

    assert level(verdict, "n2") is Level.INCONCLUSIVE
    assert verdict.nodes["n2"].reason == "did not answer in rounds 0 and 1"
    assert verdict.named(Level.HEALTHY) == ("n1", "n3", "n4")
    assert not any("n2" in group for round_ in rounds[2:] for group in round_.groups)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_a_node_whose_process_crashes_twice_is_faulty_and_its_partners_are_not(count: int) -> None:
    verdict, _ = run(names(count), spoiled_by("n2", crashed=("n2",)))

    assert verdict.named(Level.FAULTY) == ("n2",)
    assert verdict.nodes["n2"].component == "node"
    assert verdict.nodes["n2"].reason == "its check process crashed (rounds 0 and 1)"


def test_a_process_that_crashes_once_and_then_works_is_mentioned() -> None:
    verdict, _ = run(names(4), spoiled_by("n2", until=1, crashed=("n2",)))

    assert verdict.named(Level.HEALTHY) == tuple(names(4))
    assert "crashed (round 0), but worked afterwards" in verdict.nodes["n2"].reason


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_if_every_process_crashes_it_is_the_software(count: int) -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        return GroupResult(nodes=group, outcome=Outcome.FAILED, crashed=group)

    verdict, rounds = run(names(count), answer)
    assert {level(verdict, node) for node in names(count)} == {Level.INCONCLUSIVE}
    assert len(rounds) == min(count, 2)


def test_a_group_that_was_not_run_says_nothing() -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        return GroupResult(nodes=group, outcome=Outcome.NOT_RUN)

    verdict, _ = run(names(4), answer)
    assert {verdict.nodes[node].reason for node in names(4)} == {"was never measured"}
    assert {level(verdict, node) for node in names(4)} == {Level.INCONCLUSIVE}
