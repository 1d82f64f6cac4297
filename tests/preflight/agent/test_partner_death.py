# SPDX-License-Identifier: Apache-2.0
"""Both ends of a pair die when one of them breaks: who is found to be the cause."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from slurm_health.preflight.agent.node_round import NodeRound
from slurm_health.preflight.agent.worker_process import Gone, ScopeEntered
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.measurement import group_result
from slurm_health.records.records import NodeReported, Rendezvous, RoundStarted
from slurm_health.records.verdict import GroupResult, Level, Outcome, Verdict


def judged(nodes: Sequence[str], bad: Collection[str]) -> Verdict:
    """Play rounds of pairs; every process dies in a group that has a bad node in it."""
    settings = settings_from({}, kind=DeviceKind.ACCELERATOR)
    localizer = make_localizer(nodes, None, settings)
    while (planned := localizer.next_round()) is not None:
        localizer.observe(
            planned.index, [played(planned.index, group, bad) for group in planned.groups]
        )
    return localizer.verdict()


def played(index: int, group: Sequence[str], bad: Collection[str]) -> GroupResult:
    broken = bool(set(group).intersection(bad))
    report = died if broken else measured
    return group_result(group, [], {node: report(index, group, node) for node in group})


def measured(index: int, _group: Sequence[str], node: str) -> NodeReported:
    return NodeReported(node=node, round=index, outcome=Outcome.MEASURED)


def died(index: int, group: Sequence[str], node: str) -> NodeReported:
    meet = Rendezvous(address="10.0.0.1", port=1)
    started = RoundStarted(
        round=index, name="", groups=[[*group]], rendezvous=[meet], deadline_s=60.0
    )
    current = NodeRound(record=started, node=node, group=[*group], workers=8, started_s=0.0)
    current.take(3, ScopeEntered(round=index, scope="pair"))
    ending = current.gone(3, Gone("killed by SIGABRT"))
    return NodeReported(
        node=node,
        round=index,
        outcome=ending.outcome,
        detail=ending.detail,
        crashed=ending.crashed,
    )


@pytest.mark.parametrize(("count", "every"), [(4, 4), (64, 4)])
def test_the_bad_node_is_convicted_and_its_partners_are_never_accused(
    count: int, every: int
) -> None:
    nodes = [f"n{number}" for number in range(count)]
    bad = nodes[2::every]

    verdict = judged(nodes, bad)

    assert verdict.named(Level.FAULTY) == tuple(bad)
    assert verdict.named(Level.HEALTHY) == tuple(node for node in nodes if node not in bad)
