# SPDX-License-Identifier: Apache-2.0
"""What is decided about a job and its nodes: pure values, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, RunFinished
from slurm_health.records.verdict import Level, NodeVerdict

# What slowness needs to count as proven: a fault shows itself, slowness is a matter of degree.
PROVEN_PROBABILITY = 0.99
PROVEN_EVIDENCE = 2


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Take a node out of the pool: for this component, and why in words."""

    node: str
    component: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveAlone:
    """Do not drain these nodes, and say why."""

    nodes: tuple[str, ...]
    reason: str


def drains(
    bad: Sequence[NodeVerdict],
    *,
    total: int,
    drain_slow: bool,
    max_bad_share: float,
) -> tuple[Drain | LeaveAlone, ...]:
    """Decide about the bad nodes of a run on `total` nodes; slow ones only with `drain_slow`."""
    actions: list[Drain | LeaveAlone] = []
    guilty = [node for node in bad if node.level is Level.FAULTY]
    for node in bad:
        if drain_slow and node.level is Level.SLOW:
            doubt = _doubt(node)
            if doubt:
                actions.append(LeaveAlone(nodes=(node.node,), reason=doubt))
            else:
                guilty.append(node)
    if len(guilty) > max(1, int(max_bad_share * total)):
        names = tuple(node.node for node in guilty)
        count = f"{len(guilty)} of {total} nodes bad at once"
        reason = f"{count}: probably a fabric or software problem"
        return (*actions, LeaveAlone(nodes=names, reason=reason))
    return (*actions, *map(_drain, guilty))


def _drain(node: NodeVerdict) -> Drain:
    # "compute device 3" is about compute: what a test on the node is chosen by.
    return Drain(
        node=node.node,
        component=node.component.partition(" ")[0],
        reason=f"{node.component}: {node.reason}",
    )


def _doubt(node: NodeVerdict) -> str:
    """Say why slowness is not proven well enough to drain for it, empty if it is."""
    if node.probability < PROVEN_PROBABILITY:
        return (
            f"slow with a probability of {node.probability:.3f},"
            f" a drain needs {PROVEN_PROBABILITY:g}"
        )
    if len(set(node.evidence)) < PROVEN_EVIDENCE:
        return "its slowness was seen in fewer than two measurements"
    return ""


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Run on the nodes `keep`, give `drop` back, and stay in possession of `spares`."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]
    reason: str
    spares: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What becomes of the job, and the code the check ends with.

    PROCEED and STOP end the check; REQUEUE starts the job again without `nodes`, and HOLD leaves it
    in the queue because of them, until a person releases it. With `may_stay` the job is to avoid no
    faulty node, only slow or undecided ones, or a person has released it after it was held for all
    of them: it stays where it cannot leave them. With `keep_size` a requeued job waits for as many
    nodes as it had rather than start on fewer.
    """

    disposition: Disposition
    exit_code: ExitCode
    reason: str
    nodes: tuple[str, ...] = ()
    may_stay: bool = False
    keep_size: bool = False

    def recorded(self, *, nodes: Sequence[str] = (), spares: Sequence[str] = ()) -> RunFinished:
        """Return it as the journal has it, with the nodes that the job goes on with if not all."""
        return RunFinished(
            disposition=self.disposition,
            exit_code=self.exit_code,
            reason=self.reason,
            nodes=list(nodes),
            spares=list(spares),
        )


@dataclass(frozen=True, kw_only=True)
class StartQuestion:
    """What Slurm is to be asked before a job leaves slow nodes.

    Could it start at once without the nodes `leave`, on `keep` and on `more` nodes like the first
    of those that it leaves?
    """

    leave: tuple[str, ...]
    keep: tuple[str, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done about a verdict.

    Nodes are drained first, then the job is made smaller. The ending comes last: a requeue or a
    hold ends the process that performs it.
    """

    drains: tuple[Drain | LeaveAlone, ...] = ()
    shrink: Shrink | None = None
    ending: Ending
