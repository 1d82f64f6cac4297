# SPDX-License-Identifier: Apache-2.0
"""What is known of the round in progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.preflight.session.node_state import NodeState
from slurm_health.records.records import GroupAborted, NodeReported, RoundStarted
from slurm_health.records.verdict import Outcome


@dataclass
class RoundState:
    """The round in progress.

    `agents` are all of the run, `reports` what nodes said last about this round. `aborted` holds
    the record and the time of each abort. Whoever changes what is known of a node says so to
    `look_again_at`, so that a step costs what is new and not all groups.
    """

    record: RoundStarted
    started_s: float
    agents: Mapping[str, NodeState]
    reports: Mapping[str, NodeReported]
    aborted: dict[tuple[str, ...], tuple[GroupAborted, float]] = field(default_factory=dict)
    void: bool = False

    def __post_init__(self) -> None:
        self._absent = frozenset(self.record.absent)
        self.groups = [tuple(group) for group in self.record.groups]  # as planned
        self.running = sum(self.runs(group) for group in self.groups)  # how many began
        self._group_of = {node: group for group in self.groups for node in group}
        self._stale = dict.fromkeys(self.groups)
        self._awaited: dict[tuple[str, ...], str] = {}
        self._reported: set[tuple[str, ...]] = set()
        self._measured_ms: dict[tuple[str, ...], float] = {}

    def look_again_at(self, nodes: Iterable[str]) -> None:
        """Take it that more is known of these nodes than before."""
        groups = (self._group_of.get(node) for node in nodes)
        self._stale.update((group, None) for group in groups if group is not None)

    @property
    def awaited(self) -> Mapping[tuple[str, ...], str]:
        """The groups of which a report may still come, and what is known to have failed in each."""
        self._look_again()
        return self._awaited

    @property
    def reported(self) -> int:
        """How many of the groups that began have reported."""
        self._look_again()
        return len(self._reported)

    @property
    def took_ms(self) -> Iterable[float]:
        """How long each group took of which every member has measured."""
        self._look_again()
        return self._measured_ms.values()

    def _look_again(self) -> None:
        stale, self._stale = self._stale, {}
        for group in stale:
            if self.awaits(group):
                self._awaited[group] = self.failure(group)
            else:
                self._awaited.pop(group, None)
            if self.runs(group) and not self.unreported(group):
                self._reported.add(group)
            elapsed_ms = _measured_ms(group, self.reports)
            if elapsed_ms is not None:
                self._measured_ms[group] = elapsed_ms

    def runs(self, group: tuple[str, ...]) -> bool:
        """Tell whether the group began: a group with an absent member does not."""
        return self._absent.isdisjoint(group)

    def unreported(self, group: tuple[str, ...]) -> list[str]:
        """Return the members whose report is still to come."""
        return [node for node in group if node not in self.reports]

    def awaits(self, group: tuple[str, ...]) -> bool:
        """Tell whether a report of the group may still come."""
        return self.runs(group) and any(
            not self.agents[node].gone for node in self.unreported(group)
        )

    def failure(self, group: tuple[str, ...]) -> str:
        """Say which member is known to have failed, and how; empty while none is."""
        why = ""
        for node in group:
            agent, report = self.agents[node], self.reports.get(node)
            if report is None and agent.gone:
                why = f"{node} is gone: {agent.lost or agent.failed}"
            elif report is not None and report.outcome is not Outcome.MEASURED:
                own = report.crashed or report.wrong_results
                why = f"{node} {'failed' if own else 'reports'}: {report.detail}"
        return why

    def silent(self) -> list[str]:
        """Name the members nobody answered for: their group says nothing about the others."""
        return [
            node
            for group in self.groups
            for node in group
            if node in self.record.absent or (self.runs(group) and node not in self.reports)
        ]

    def measured_ms(self, reports: Mapping[str, NodeReported]) -> list[float]:
        """Return how long each group took of which every member measured, by these reports."""
        elapsed = (_measured_ms(group, reports) for group in self.groups)
        return [elapsed_ms for elapsed_ms in elapsed if elapsed_ms is not None]


def _measured_ms(group: Sequence[str], reports: Mapping[str, NodeReported]) -> float | None:
    """Return how long a group took, None where not every member has measured."""
    longest_ms: float | None = None
    for node in group:
        report = reports.get(node)
        if report is None or report.outcome is not Outcome.MEASURED:
            return None
        longest_ms = max(report.elapsed_ms, longest_ms or 0.0)
    return longest_ms
