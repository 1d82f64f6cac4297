# SPDX-License-Identifier: Apache-2.0
"""What of the master's words concerns which node. Pure.

A node gets its own part and no more: what all nodes get together grows with their number, not
with its square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_health.records.records import (
    Action,
    ActionIntended,
    AgentsLaunched,
    GroupAborted,
    MasterWaits,
    Record,
    RoundStarted,
    RunFinished,
    RunStarted,
    VerdictReached,
)


def parts(record: Record, nodes: Sequence[str]) -> Mapping[str, Record]:
    """Return what each of `nodes` is to hear of a record; who is not named hears nothing."""
    match record:
        case RunStarted():
            return {node: replace(record, nodes=[node]) for node in nodes}
        case AgentsLaunched(nodes=launched):
            return {node: replace(record, nodes=[node]) for node in set(launched) & set(nodes)}
        case RoundStarted():
            return _of_round(record, nodes)
        case GroupAborted(group=group):
            return dict.fromkeys(set(group) & set(nodes), record)
        case VerdictReached(nodes=judged):
            return {
                each.node: VerdictReached(nodes=[each]) for each in judged if each.node in nodes
            }
        case MasterWaits() | ActionIntended(action=Action.PROCEED) | RunFinished():
            return dict.fromkeys(nodes, record)
        case _:
            return {}


def _of_round(record: RoundStarted, nodes: Sequence[str]) -> Mapping[str, Record]:
    absent, wanted = set(record.absent), set(nodes)
    found: dict[str, Record] = {}
    for group, meeting in zip(record.groups, record.rendezvous, strict=True):
        part = replace(
            record,
            groups=[group],
            rendezvous=[meeting],
            absent=[node for node in group if node in absent],
        )
        found |= dict.fromkeys(wanted.intersection(group), part)
    return found
