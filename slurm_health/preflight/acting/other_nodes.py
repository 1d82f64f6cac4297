# SPDX-License-Identifier: Apache-2.0
"""Ask Slurm whether a job that leaves its slow nodes could start again at once."""

from __future__ import annotations

from slurm_health.preflight.acting.job_facts import cause
from slurm_health.preflight.decide import elsewhere
from slurm_health.preflight.decide.decision import Question
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.records.allocation import Estimate
from slurm_health.records.errors import SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.client import Client


def wait(question: Question, *, job: str, facts: JobFacts, client: Client, now_s: float) -> str:
    """Say why the job would have to wait, empty if it could start at once.

    What Slurm does not tell, or will not promise, is a wait. `job` is what Slurm calls the job.
    """
    try:
        if not facts.may_drain and client.hides_jobs():
            return "Slurm does not show which jobs of others wait for nodes (PrivateData=jobs)"
        waiting = client.waiting(facts.neighbours or (facts.partition,))
        return elsewhere.wait_behind_jobs(job, facts.partition, waiting) or _wait_for_nodes(
            question, job=job, facts=facts, client=client, now_s=now_s
        )
    except SlurmError as err:
        return f"Slurm promises it no other nodes: {cause(err)}"


def _wait_for_nodes(
    question: Question, *, job: str, facts: JobFacts, client: Client, now_s: float
) -> str:
    estimate: Estimate | None = None
    if question.more:
        fields, has = client.in_full(job, question.leave[0])
        obstacle = elsewhere.obstacle_to_asking(fields)
        if obstacle:
            return f"whether it would have to wait for nodes cannot be told: {obstacle}"
        options = elsewhere.request(fields, has, facts.placement, more=question.more)
        # Its own nodes are no further ones: Slurm would count them in for when the job ends.
        avoid = fold([*facts.excluded, *question.leave, *question.keep])
        estimate = client.estimate([*options, f"--exclude={avoid}"])
    names = (*question.keep, *(estimate.nodes if estimate else ()))
    states = client.nodes(sorted(set(names)))
    unusable = {name: node.state for name, node in states.items() if node.out_of_pool}
    return elsewhere.wait_for_nodes(question.more, estimate, unusable, now_s=now_s)
