# SPDX-License-Identifier: Apache-2.0
"""What follows a failed script: it is started again, stops, or its nodes are looked at. Pure.

Only nodes that evidence names are held at fault here. Where evidence decides nothing, the check of
the nodes does, and what follows its verdict is decided where it always is, in `decide`. That is the
check that was asked for, unless training waits long for it: a failure may be the first sign of what
only that one shows, as of a node that has become slow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from slurm_health.records import probe_catalog
from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import (
    Attribution,
    Diagnosed,
    FailurePlanned,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, NodeVerdict

QUICK = "quick"
# A job that Slurm requeues waits two minutes at the least: to restart in place is to be sooner.
LIMIT_S = 120.0
# A verdict wants a figure; an inference has none that anybody counted. `likely` must not be read as
# the 99 % that measured rounds can reach.
_PROBABILITY = {"possible": 0.5, "likely": 0.9, "certain": 0.99}
_MOST_OF_A_KIND = 2  # restarts after hangs of one cause, nodes that are at fault aside


class Next(StrEnum):
    """What is done about a failed script."""

    STOP = "stop"  # the job ends as it would
    RESTART = "restart"  # the script is started again where it ran
    CHECK = "check"  # nodes are checked first, and their verdict decides
    LEAVE = "leave"  # nodes are known to be at fault, and what follows is as after a check


@dataclass(frozen=True, kw_only=True)
class ScriptFailure:
    """A failed script, and what is known of it and its nodes.

    Args:
        diagnosed: what the post-mortem found, None where there was none.
        job_over: what Slurm calls the job where that no longer runs, else empty.
        batch_node: the node that the job cannot be without.
        nodes: the nodes that the script ran on.
        spares: nodes that the job keeps beside these.
        lost: nodes of both that Slurm has lost and taken out of the job, with what it says of them.
        restarted_unchecked: this start of the job has restarted the script before without a check.
        least: with how few nodes the job goes on; None if it has to be requeued without one.
        hang: the hang for which this start of the script was ended, None where it ended otherwise.
        before: what the post-mortems of earlier starts in this job found, oldest first.
        hangs_before: those for which earlier starts of it in this attempt of the job were ended.
    """

    diagnosed: Diagnosed | None
    batch_node: str
    nodes: tuple[str, ...]
    job_over: str = ""
    spares: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    restarted_unchecked: bool = False
    least: int | None = None
    hang: TrainingEvent | None = None
    hangs_before: tuple[TrainingEvent, ...] = ()
    before: tuple[Diagnosed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done next, why, and on what evidence.

    `check` are the nodes to check; `at_fault` those that the job leaves whatever that finds, and
    `last_choice` those that it does without if it has others that are as well.
    """

    next: Next
    reason: str
    evidence: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    at_fault: tuple[NodeVerdict, ...] = ()
    last_choice: tuple[str, ...] = ()

    def recorded(self, *, restart: int, max_restarts: int) -> FailurePlanned:
        """Return it as the journal has it, with the number of this restart of at most these."""
        return FailurePlanned(
            plan=self.next.value,
            reason=self.reason,
            restart=restart,
            max_restarts=max_restarts,
            evidence=list(self.evidence),
            nodes=[verdict.node for verdict in self.at_fault],
        )


def plan(failure: ScriptFailure) -> Plan:
    """Decide what follows a failed script.

    Guarantees: what a person or a limit ended stays ended; a user's error is never retried and
    accuses no node; no node is left without evidence against that node.
    """
    diagnosed = failure.diagnosed
    evidence = tuple(diagnosed.evidence) if diagnosed else ()
    what = diagnosed.description if diagnosed else "no post-mortem says why"
    if failure.job_over:
        return Plan(next=Next.STOP, reason=f"Slurm calls the job {failure.job_over}")
    if diagnosed and diagnosed.attribution == Attribution.OUTSIDE:
        return Plan(next=Next.STOP, reason=what, evidence=evidence)
    guilty = _at_fault(failure)
    alike = [earlier for earlier in failure.before if diagnosed and _alike(earlier, diagnosed)]
    if guilty and diagnosed and not failure.lost:
        left = sorted({node for earlier in alike for node in earlier.accused})
        if left and not set(left) & set(diagnosed.accused):
            reason = f"{what}: the same as on {fold(left)}, which the job left for it; it follows"
            return Plan(next=Next.STOP, reason=f"{reason} the job, not a node", evidence=evidence)
    if guilty:
        return _without(failure, guilty)
    if diagnosed and diagnosed.attribution == Attribution.USER:
        reason = f"{what} ({Attribution.USER}): the same again would fail again"
        return Plan(next=Next.STOP, reason=reason, evidence=evidence)
    all_nodes = (*failure.nodes, *failure.spares)
    if failure.hang is not None:
        return _after_hang(failure.hang, failure, evidence)
    if diagnosed and alike and diagnosed.attribution == Attribution.UNDECIDED and evidence:
        reason = f"{what}; it failed in these words before, and its nodes have been checked since"
        return Plan(next=Next.STOP, reason=reason, evidence=evidence)
    if diagnosed and diagnosed.attribution == Attribution.TRANSIENT:
        if not failure.restarted_unchecked:
            reason = f"{what} ({Attribution.TRANSIENT})"
            return Plan(next=Next.RESTART, reason=reason, evidence=evidence)
        what += "; it is not the first time"
    return Plan(next=Next.CHECK, reason=what, evidence=evidence, check=all_nodes)


def _alike(earlier: Diagnosed, later: Diagnosed) -> bool:
    """Tell whether two failures have one cause in the same words, whatever the rank or address."""

    def words(found: Diagnosed) -> str:
        first = found.evidence[0] if found.evidence else ""
        for node in found.nodes:
            first = first.replace(node, "")
        return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", first)

    return earlier.cause == later.cause and words(earlier) == words(later)


def _after_hang(hang: TrainingEvent, failure: ScriptFailure, evidence: tuple[str, ...]) -> Plan:
    """Check all nodes, and take those where it hung last: that they are at fault is not shown.

    A hang without a place restarts once, another kind as often as `_MOST_OF_A_KIND`.
    """
    what = f"the training hung: {hang.description}"
    if hang.is_of_script:
        reason = f"{what}; in the script's own code or data, the same again would hang again"
        return Plan(next=Next.STOP, reason=reason, evidence=evidence)
    kind, most = (_kind(hang), _MOST_OF_A_KIND) if hang.located else ("without a place", 1)
    before = sum(_kind(earlier) == _kind(hang) for earlier in failure.hangs_before)
    if before >= most:
        times = "once" if before == 1 else f"{before} times"
        reason = f"{what}; the script was already started again {times} after such a hang ({kind})"
        return Plan(next=Next.STOP, reason=reason, evidence=evidence)
    there = tuple(hang.nodes) if hang.located else ()
    few = len(there) <= len(failure.nodes) / 2
    return Plan(
        next=Next.CHECK,
        reason=what,
        evidence=evidence,
        check=(*failure.nodes, *failure.spares),
        last_choice=there if few else (),
    )


def _kind(hang: TrainingEvent) -> str:
    return hang.diagnosed.cause if hang.diagnosed and hang.located else ""


def _at_fault(failure: ScriptFailure) -> tuple[NodeVerdict, ...]:
    """Return the nodes that evidence is against: those that Slurm lost, and those accused."""
    diagnosed = failure.diagnosed
    verdicts = {
        node: NodeVerdict(
            node=node,
            level=Level.FAULTY,
            reason="Slurm lost it while the job ran",
            evidence=(state,),
        )
        for node, state in failure.lost
    }
    for node in diagnosed.accused if diagnosed else ():
        verdicts.setdefault(
            node,
            NodeVerdict(
                node=node,
                level=Level.FAULTY,
                probability=_PROBABILITY[diagnosed.sureness] if diagnosed else 1.0,
                reason=diagnosed.description if diagnosed else "",
                evidence=tuple(diagnosed.evidence if diagnosed else ()) or ("the post-mortem",),
            ),
        )
    return tuple(verdicts.values())


def _without(failure: ScriptFailure, guilty: tuple[NodeVerdict, ...]) -> Plan:
    names = {verdict.node for verdict in guilty}
    left = tuple(node for node in (*failure.nodes, *failure.spares) if node not in names)
    evidence = tuple(dict.fromkeys(line for verdict in guilty for line in verdict.evidence))
    at_fault = "; ".join(f"{verdict.node}: {verdict.reason}" for verdict in guilty)
    stays = failure.batch_node not in names
    if stays and failure.least is not None and len(left) >= failure.least:
        return Plan(
            next=Next.CHECK,
            reason=f"{at_fault}; the script is to go on without {fold(sorted(names))}",
            evidence=evidence,
            check=left,
            at_fault=guilty,
        )
    return Plan(next=Next.LEAVE, reason=at_fault, evidence=evidence, at_fault=guilty)


@dataclass(frozen=True, kw_only=True)
class CheckAgain:
    """What is to be checked, and why that is less than was asked for; else empty."""

    check: str
    less: str = ""


def check_again(asked: str | None, took_s: float | None, *, quick: str = QUICK) -> CheckAgain:
    """Return the check before a restart.

    Args:
        asked: what the user wants checked before the script, None where that was left open.
        took_s: how long that check took, seconds; None where it came to no verdict.
        quick: the check of seconds that is made otherwise.
    """
    items = {item.strip() for item in (asked or "").split(",")}
    if probe_catalog.LIGHT_SET in items:
        return CheckAgain(check=probe_catalog.LIGHT_SET)
    if asked is None or items <= {probe_catalog.AUTO, "off", quick}:
        return CheckAgain(check=quick)
    if took_s is None:
        return CheckAgain(check=quick, less=f"{asked} came to no verdict before")
    if took_s > LIMIT_S:
        less = f"{asked} took {took_s:.0f} s before, and a restart waits {LIMIT_S:.0f} s at most"
        return CheckAgain(check=quick, less=less)
    return CheckAgain(check=asked)
