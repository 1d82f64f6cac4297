# SPDX-License-Identifier: Apache-2.0
"""What the real rules make of played values: `preflight.decide`, before and after a failure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.year.care import Defect
from benchmarks.year.checks import FAILS, Shown
from benchmarks.year.jobs import Job
from benchmarks.year.kinds import Effect
from benchmarks.year.policies import Policy, Spares
from slurm_health.preflight.decide import after_failure
from slurm_health.preflight.decide.after_failure import Plan, ScriptFailure
from slurm_health.preflight.decide.decide import Case, decide
from slurm_health.preflight.decide.decision import Decision
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.policy import Policy as JobPolicy
from slurm_health.preflight.decide.spares import RECORDED_PER_NODE_DAY
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Attribution, Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict

_STANDBY = 0.99


def decided_of(
    job: Job,
    accused: Mapping[int, NodeVerdict],
    policy: Policy,
    *,
    asked: int,
    others_free: bool,
    last_choice: tuple[str, ...],
) -> Decision:
    """Return what is decided about a job whose check accuses these nodes."""
    verdict = VerdictReached(
        nodes=[
            msgspec.structs.replace(accused[node], node=str(node))
            if node in accused
            else NodeVerdict(node=str(node), level=Level.HEALTHY)
            for node in job.nodes
        ]
    )
    allowed = JobPolicy(
        max_requeues=policy.max_requeues,
        nodes_wanted=job.size if policy.spares is not Spares.NONE else None,
        keep_spares=policy.keeps,
        last_choice=last_choice,
    )
    facts = JobFacts(
        job_id=id_of(job),
        batch_node=str(job.nodes[0]),
        requeues=job.requeues,
        partition="gpu",
        asked=asked,
        wait="" if others_free else "no other node is free",
    )
    return decide(Case.of(verdict, allowed, facts))


def planned_of(job: Job, node: int, *, named: bool, lost: bool) -> Plan:
    """Return what follows a failure at a node, which the post-mortem names or not."""
    return after_failure.plan(
        ScriptFailure(
            diagnosed=Diagnosed(
                cause="played",
                description="a device failed" if named else "a rank was lost",
                attribution=Attribution.NODE if named else Attribution.UNDECIDED,
                sureness="likely",
                accused=[str(node)] if named else [],
                evidence=["played"],
            ),
            batch_node=str(job.nodes[0]),
            nodes=tuple(map(str, job.nodes)),
            spares=tuple(map(str, job.spares)),
            lost=((str(node), "DOWN"),) if lost else (),
            least=job.size,
        )
    )


def binomial_spares(nodes: int) -> int:
    """Return the 99 % point of how many nodes fail in a day, as ByteRobust's standbys."""
    rate, below, chance = RECORDED_PER_NODE_DAY, 0.0, (1 - RECORDED_PER_NODE_DAY) ** nodes
    for spares in range(nodes + 1):
        below += chance
        if below >= _STANDBY:
            return spares
        chance *= (nodes - spares) / (spares + 1) * rate / (1 - rate)
    return nodes


def shown(defect: Defect) -> Shown:
    """Return how a defect shows itself in a check that sees it."""
    return defect.kind.slowdown if defect.kind.effect is Effect.SLOWS else FAILS


def id_of(job: Job) -> int:
    """Return the job's number for Slurm."""
    return 1 + job.slot * 100_000 + job.number
