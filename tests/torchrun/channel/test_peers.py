# SPDX-License-Identifier: Apache-2.0
"""What of the master's words each node hears."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.records.records import (
    Action,
    ActionIntended,
    AgentsLaunched,
    JobOutcome,
    MasterWaits,
    Record,
    Rendezvous,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Disposition, Level, NodeVerdict
from slurm_health.torchrun.channel import peers
from tests.torchrun.channel.test_node_zero import NODES

ROUND = RoundStarted(
    round=0,
    groups=[["node0", "node1"], ["node2", "node3"]],
    rendezvous=[Rendezvous(address="a", port=1), Rendezvous(address="b", port=2)],
    deadline_s=9.0,
    absent=["node3"],
)


def test_each_node_hears_its_own_part() -> None:
    others = ["node1", "node2"]
    parts = peers.parts(ROUND, others)
    assert set(parts) == set(others)
    assert parts["node1"] == msgspec.structs.replace(
        ROUND, groups=[["node0", "node1"]], rendezvous=[ROUND.rendezvous[0]], absent=[]
    )
    launched = AgentsLaunched(launch=1, nodes=["node0", "node2"])
    assert peers.parts(launched, others) == {"node2": AgentsLaunched(launch=1, nodes=["node2"])}
    judged = [NodeVerdict(node=node, level=Level.HEALTHY) for node in NODES]
    told = peers.parts(VerdictReached(nodes=judged), others)
    assert told["node1"] == VerdictReached(nodes=judged[1:2])


@pytest.mark.parametrize(
    "record",
    [
        MasterWaits(reason=""),
        ActionIntended(action=Action.PROCEED, nodes=list(NODES)),
        JobOutcome(disposition=Disposition.PROCEED, exit_code=0),
    ],
)
def test_all_hear_what_concerns_all(record: Record) -> None:
    assert peers.parts(record, ["node1", "node2"]) == {"node1": record, "node2": record}
