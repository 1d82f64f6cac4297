# SPDX-License-Identifier: Apache-2.0
"""What the Localizer concludes, from the smallest runs upwards."""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec
import pytest
from msgspec import structs

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    Outcome,
    Round,
    Verdict,
)
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather
from slurm_health.records.probe_catalog import Metric
from tests.support.rows import rows

Answer = Callable[[int, tuple[str, ...]], GroupResult]


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def cluster(
    *,
    dead: Collection[str] = (),
    network: Mapping[str, float] | None = None,
    compute: Mapping[str, float] | None = None,
    noise: float = 0.02,
    seed: int = 0,
) -> Answer:
    """Answer as a cluster in which these nodes are dead, or slow by these factors."""
    rng = random.Random(seed)

    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        matmul = {
            node: 3.0 * (compute or {}).get(node, 1.0) * math.exp(rng.gauss(0, noise))
            for node in group
        }
        if set(group) & set(dead):
            return GroupResult(nodes=group, outcome=Outcome.TIMED_OUT, node_ms={"matmul": matmul})
        slowest = max((network or {}).get(node, 1.0) for node in group)
        return GroupResult(
            nodes=group,
            outcome=Outcome.MEASURED,
            shared_ms={"allgather": 50.0 * slowest * math.exp(rng.gauss(0, noise))},
            node_ms={"matmul": matmul},
        )

    return answer


def run(
    nodes: list[str],
    answer: Answer,
    *,
    seed: int = 0,
    kind: DeviceKind = DeviceKind.ACCELERATOR,
    chosen: Mapping[str, object] = MappingProxyType({}),
    topology: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Verdict, list[Round]]:
    settings = replace(settings_from(chosen, kind=kind), seed=seed)
    loc = Localizer(nodes, topology=topology, settings=settings)
    rounds = []
    while (round_ := loc.next_round()) is not None:
        rounds.append(round_)
        loc.observe(round_.index, [answer(round_.index, group) for group in round_.groups])
    return loc.verdict(), rounds


def planned(loc: Localizer) -> Round:
    round_ = loc.next_round()
    assert round_ is not None
    return round_


def accused(verdict: Verdict) -> set[str]:
    return {*verdict.named(Level.SLOW), *verdict.named(Level.FAULTY)}


def test_two_equally_slow_nodes_that_meet_in_the_first_round_are_found() -> None:
    first = planned(Localizer(names(4)))
    bad = first.groups[0]
    verdict, rounds = run(names(4), cluster(network=dict.fromkeys(bad, 1.5)))
    assert rounds[0] == first
    assert set(verdict.named(Level.SLOW)) == set(bad)


def test_of_four_nodes_a_verdict_after_one_round_says_what_two_pairs_cannot_show() -> None:
    one_of_each = {group[0]: 1.5 for group in planned(Localizer(names(4))).groups}

    verdict, rounds = run(names(4), cluster(network=one_of_each))
    assert len(rounds) == 1
    for node in names(4):
        assert verdict.nodes[node].level is Level.HEALTHY
        assert "not excluded: an equally slow node in either pair" in verdict.nodes[node].reason

    twice, _ = run(names(4), cluster(), chosen={"min_rounds": 2})
    assert all("not excluded" not in found.reason for found in twice.nodes.values())


def test_of_two_nodes_nobody_can_say_that_their_network_is_as_fast_as_others() -> None:
    verdict, _ = run(names(2), cluster())
    assert "not excluded: a slow network" in verdict.nodes["n1"].reason

    expected = {"expected_ms": {"allgather": 50}}
    known, _ = run(names(2), cluster(), chosen=expected)
    assert "not excluded" not in known.nodes["n1"].reason


def test_a_single_node_is_measured_alone_and_told_that_the_network_is_untested() -> None:
    verdict, rounds = run(names(1), cluster())
    assert [round_.groups for round_ in rounds] == [(("n1",),)]
    assert verdict.nodes["n1"].level is Level.HEALTHY
    assert "no partner" in verdict.nodes["n1"].reason


def test_devices_that_are_all_slow_are_said_to_be_slower_than_expected_and_not_than_peers() -> None:
    slow = cluster(compute=dict.fromkeys(names(4), 1.7))
    verdict, _ = run(names(4), slow, chosen={"expected_ms": {"matmul": 2.4}})

    assert {verdict.nodes[node].level for node in names(4)} == {Level.SLOW}
    assert "slower than expected of this model (" in verdict.nodes["n1"].reason
    assert "expected at most 3 ms)" in verdict.nodes["n1"].reason

    known, _ = run(names(4), cluster(compute={"n3": 1.7}), chosen={"expected_ms": {"matmul": 9.0}})
    assert "slower than its peers (" in known.nodes["n3"].reason
    assert ", peers " in known.nodes["n3"].reason


def test_a_node_whose_only_partner_died_by_itself_is_cleared_by_what_it_measured_alone() -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        matmul: dict[Metric | str, Mapping[str, float]] = {"matmul": dict.fromkeys(group, 3.0)}
        crashed, said = ("n2",), {"n2": "stopped by a signal for 1 s"}
        return GroupResult(
            nodes=group, outcome=Outcome.FAILED, node_ms=matmul, crashed=crashed, said=said
        )

    verdict, _ = run(names(2), answer)

    assert verdict.nodes["n2"].level is Level.FAULTY
    assert verdict.nodes["n1"].level is Level.HEALTHY
    assert verdict.nodes["n1"].reason == "no partner to test the network with"


@pytest.mark.parametrize("count", [2, 3, 4, 7, 30])
def test_when_nobody_passes_nobody_is_condemned(count: int) -> None:
    verdict, _ = run(names(count), cluster(dead=names(count)))
    assert {verdict.nodes[node].level for node in names(count)} == {Level.INCONCLUSIVE}


@pytest.mark.parametrize("seed", range(5))
@rows
def test_a_slow_network_is_not_blamed_where_the_cores_that_carry_it_are_slow_too(
    kind: DeviceKind, compute: float, component: str, seed: int
) -> None:
    answer = cluster(network={"n3": 6.0}, compute={"n3": compute}, noise=0.05, seed=seed)

    verdict, _ = run(names(4), answer, seed=seed, kind=kind)

    found = verdict.nodes["n3"]
    assert (found.level, found.component) == (Level.SLOW, component)
    assert ("matmul" in found.reason) is (component == "node")


@pytest.mark.parametrize(
    ("quiet", "times", "noise", "seed"),
    [
        *((0, 1.6, 0.02, seed) for seed in range(8)),
        *((quiet, 2.0, 0.03, seed) for quiet in range(5) for seed in range(2)),
    ],
)
def test_a_cluster_that_is_slow_in_all_rounds_but_one_accuses_no_node_of_it(
    quiet: int, times: float, noise: float, seed: int
) -> None:
    # Of four nodes one is dead, and the other three are tested a pair at a time: whoever is not in
    # the quiet round must not look slow.
    answer = cluster(dead=["n1"], noise=noise, seed=seed)

    def slowed(index: int, group: tuple[str, ...]) -> GroupResult:
        found = answer(index, group)
        factor = 1.0 if index == quiet else times
        return structs.replace(
            found, shared_ms={name: factor * ms for name, ms in found.shared_ms.items()}
        )

    verdict, _ = run(names(4), slowed, seed=seed)

    assert {verdict.nodes[node].level for node in names(4)[1:]} <= {
        Level.HEALTHY,
        Level.INCONCLUSIVE,
    }


def test_two_nodes_that_cannot_reach_each_other_are_not_tried_as_a_control_for_ever() -> None:
    answer = cluster(dead=["n1"])

    def cut(index: int, group: tuple[str, ...]) -> GroupResult:
        if set(group) == {"n3", "n4"}:
            return GroupResult(nodes=group, outcome=Outcome.TIMED_OUT)
        return answer(index, group)

    verdict, rounds = run(names(4), cut)

    tried = [round_.index for round_ in rounds if ("n3", "n4") in round_.groups]
    assert len(tried) <= 5  # as many as it takes to tell the path from its ends
    assert verdict.nodes["n1"].level is Level.FAULTY
    assert {verdict.nodes[node].level for node in names(4)[1:]} == {Level.HEALTHY}
    assert [path.ends for path in verdict.paths] == [("n3", "n4")]


def test_of_two_nodes_the_slow_one_is_convicted_by_six_tests_and_by_no_fewer() -> None:
    nodes = ["n1", "n2"]
    weather = Weather(noise=0.01, spread=0.0, device_spread=0.0, spikes=0.0)
    cluster = SimulatedCluster(nodes, faults=Faults(compute={"n1": 2.0}), weather=weather)
    localizer = Localizer(nodes)
    levels = []
    while (round_ := localizer.next_round()) is not None:
        localizer.observe(round_.index, cluster.answer(round_))
        levels.append(localizer.verdict().nodes["n1"].level)

    assert levels == [Level.INCONCLUSIVE] * 5 + [Level.SLOW]


class Spoiled(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of the groups of one node in the first rounds."""

    node: str
    until: int = 99
    outcome: Outcome = Outcome.FAILED
    crashed: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    said: dict[str, str] = {}


def spoiled_by(how: Spoiled) -> Answer:
    """Answer as well nodes do, but for the groups of one node."""
    healthy = cluster()

    def answer(index: int, group: tuple[str, ...]) -> GroupResult:
        if how.node not in group or index >= how.until:
            return healthy(index, group)
        return GroupResult(
            nodes=group,
            outcome=how.outcome,
            crashed=how.crashed,
            silent=how.silent,
            said={name: how.said[name] for name in group if name in how.said},
        )

    return answer


@rows
def test_what_happened_to_a_node_decides_and_is_said_and_its_partners_are_not_blamed(
    count: int, spoiled: Spoiled, node: str, level: Level, reason: str
) -> None:
    verdict, rounds = run(names(count), spoiled_by(spoiled))
    found = verdict.nodes[node]

    assert (found.level, reason in found.reason) == (level, True), found.reason
    assert found.component == "node" or "crashed (rounds" not in reason
    assert not accused(verdict) - {node}
    silent = any(node in group for round_ in rounds[2:] for group in round_.groups)
    assert not silent or "did not answer" not in reason


@pytest.mark.parametrize("failing", [{0, 2}, {0, 2, 4}, {0, 2, 4, 6}, {0, 1, 2, 3, 4}])
def test_two_nodes_that_fail_together_now_and_then_are_in_doubt(failing: set[int]) -> None:
    well = cluster()

    def answer(index: int, group: tuple[str, ...]) -> GroupResult:
        bad = GroupResult(nodes=group, outcome=Outcome.TIMED_OUT)
        return bad if index in failing else well(index, group)

    verdict, _ = run(names(2), answer)

    assert {verdict.nodes[node].level for node in names(2)} == {Level.INCONCLUSIVE}
    assert "no allgather with n2 (timed out)" in verdict.nodes["n1"].reason


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_if_every_process_crashes_it_is_the_software(count: int) -> None:
    def answer(_round: int, group: tuple[str, ...]) -> GroupResult:
        return GroupResult(nodes=group, outcome=Outcome.FAILED, crashed=group)

    verdict, rounds = run(names(count), answer)
    assert {verdict.nodes[node].level for node in names(count)} == {Level.INCONCLUSIVE}
    assert len(rounds) == min(count, 2)
