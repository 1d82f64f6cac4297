# SPDX-License-Identifier: Apache-2.0
"""A job from its start to its end: checks, failures, restarts, and what of it is training.

Real is what a check's verdict and a failure lead to (`rules`). Played are the queue, durations and
what a script does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.year import jobs, kinds
from benchmarks.year.care import Care, Cluster, Defect
from benchmarks.year.checks import Checks, Outcome
from benchmarks.year.jobs import Job
from benchmarks.year.kinds import Effect
from benchmarks.year.policies import Rule, Spares
from benchmarks.year.rules import binomial_spares, decided_of, id_of, planned_of, shown
from slurm_health.preflight.decide.after_failure import Next
from slurm_health.preflight.decide.spares import spares_for
from slurm_health.records.records import Disposition
from slurm_health.records.standings import Rates
from slurm_health.records.verdict import Level, NodeVerdict

# A requeued job begins when Slurm's credentials have expired (docs/admin/policy.md).
REQUEUE_S = 120.0
# A script that starts on a broken node fails within the time that it takes to load.
FAILS_AFTER_S = 300.0
# A person sees that a job has ended, and submits it again. Assumed.
RESUBMIT_S = 3600.0


class Training:
    """All jobs. `on_start` is told which nodes a job has, `on_spoiled` which spoiled it."""

    def __init__(self, cluster: Cluster, care: Care, checks: Checks) -> None:
        self.on_start: Callable[[Sequence[int]], None] = lambda _: None
        self.on_spoiled: Callable[[int, Job, str], None] = lambda *_: None
        self._policy, self._care, self._checks = cluster.policy, care, checks
        self._clock, self._pool, self._tally = cluster.clock, cluster.pool, cluster.tally
        self._rng = random.Random(f"training {cluster.seed}")
        self._seed = cluster.seed
        self._rates: Rates | None = None
        self._spares: dict[int, int] = {}
        self._queue: list[deque[Job]] = [deque() for _ in jobs.TIERS]
        self._numbers = 0
        self.jobs: dict[int, Job] = {}
        care.on_fault = self._on_fault
        care.on_lost = self._on_lost
        for slot, (tier, size) in enumerate(jobs.slots(len(care.nodes))):
            self._submit(slot, tier, size)

    def _submit(self, slot: int, tier: int, size: int) -> None:
        self._numbers += 1
        before = self.jobs.get(slot)
        number = before.number + 1 if before else 0
        job = jobs.job_of(slot, tier, size, number=number, seed=self._seed)
        self.jobs[slot] = job
        self._queue[tier].append(job)

    # --- the queue -------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start what can start: large jobs first, and none before one that waits for nodes."""
        for tier, waiting in enumerate(self._queue):
            while waiting:
                job = waiting[0]
                last = self._in_probation() if tier <= jobs.LARGE else frozenset()
                count = job.size + self._spares_of(job.size)
                nodes = self._pool.take(count, job.excluded, last)
                if nodes is None:
                    return
                waiting.popleft()
                self._start(job, nodes)

    def _in_probation(self) -> frozenset[int]:
        if not self._policy.probation_last:
            return frozenset()
        now_s, nodes = self._clock.now_s, self._care.nodes
        return frozenset(n for n in self._pool.free if nodes[n].probation_until_s > now_s)

    def _spares_of(self, size: int) -> int:
        if size not in self._spares:
            hours = self._policy.spares_for_h
            if self._policy.spares is Spares.ADVISED:
                self._spares[size] = spares_for(self._rates, size, hours=hours).count
            elif self._policy.spares is Spares.BINOMIAL:
                self._spares[size] = binomial_spares(size)
            else:
                self._spares[size] = 0
        return self._spares[size]

    def _start(self, job: Job, nodes: list[int]) -> None:
        job.nodes, job.spares = nodes, []
        job.since_s, job.restarts = self._clock.now_s, 0
        job.restarts_allowed = len(nodes) - job.size
        for node in nodes:
            self._care.owned[node] = job
        self.on_start(nodes)
        if self._policy.rule is Rule.NOBODY:
            job.spares = nodes[job.size :]
            job.nodes = nodes[: job.size]
            self._load(job)
        else:
            self._check(job, ())

    # --- checks ----------------------------------------------------------------------------

    def _check(self, job: Job, last_choice: tuple[str, ...]) -> None:
        """Check the job's nodes and spares; what is bad by now shows."""
        job.nodes, job.spares = [*job.nodes, *job.spares], []
        job.state, job.version = "checking", job.version + 1
        defects = self._care.defects
        seen = [n for n in job.nodes if n in defects and self._care.shows(n, "check")]
        seen.sort(key=lambda node: shown(defects[node]))
        outcome = self._checks.of(job.size, [shown(defects[node]) for node in seen], self._rng)
        version = job.version
        self._clock.after(
            outcome.took_s,
            lambda: (
                self._judge(job, seen, outcome, last_choice) if job.version == version else None
            ),
        )

    def _judge(
        self, job: Job, seen: list[int], outcome: Outcome, last_choice: tuple[str, ...]
    ) -> None:
        accused = {
            node: said for node, said in zip(seen, outcome.bad, strict=True) if said is not None
        }
        others = [node for node in job.nodes if node not in self._care.defects]
        for said in outcome.innocent[: len(others)]:
            accused[self._rng.choice(others)] = said
        for node, said in accused.items():
            slow = said.level is Level.SLOW
            self.on_spoiled(node, job, said.level.value)
            self._care.accused(node, job=id_of(job), uid=job.uid, slow=slow)
        if self._policy.rule is Rule.DLROVER:
            self._leave(job, set(accused)) if accused else self._load(job)
            return
        if accused or len(job.nodes) > job.size:
            self._decide(job, accused, last_choice)
        else:
            self._load(job)

    def _decide(
        self, job: Job, accused: dict[int, NodeVerdict], last_choice: tuple[str, ...]
    ) -> None:
        """Do what the real rules decide."""
        decided = decided_of(
            job,
            accused,
            self._policy,
            asked=job.size + self._spares_of(job.size),
            others_free=self._pool.fits(len(accused), job.excluded),
            last_choice=last_choice,
        )
        if decided.shrink is not None:
            kept = [int(name) for name in decided.shrink.keep]
            spares = [int(name) for name in decided.shrink.spares]
            job.excluded.update(accused)
            self._keep(job, kept, spares)
        if decided.ending.disposition is Disposition.PROCEED:
            self._load(job)
        elif decided.ending.disposition is Disposition.REQUEUE:
            job.requeues += 1
            self._leave(job, {int(name) for name in decided.ending.nodes})
        else:
            job.requeues = 0
            self._leave(job, set(accused), RESUBMIT_S)

    # --- the script ------------------------------------------------------------------------

    def _load(self, job: Job) -> None:
        job.state, job.version = "loading", job.version + 1
        version = job.version
        broken = [
            (node, defect)
            for node in job.nodes
            if (defect := self._care.defects.get(node)) is not None
            and defect.active
            and defect.kind.effect is Effect.STOPS
        ]
        if broken:
            node, defect = broken[0]
            self._clock.after(FAILS_AFTER_S, lambda: self._strike(job, version, node, defect))
        else:
            self._clock.after(jobs.LOAD_S, lambda: self._run(job, version))

    def _run(self, job: Job, version: int) -> None:
        if job.version != version:
            return
        job.state, job.progress_s = "running", 0.0
        job.running_s = self._clock.now_s
        if job.failed_s is not None:
            self._tally.again_s.append(self._clock.now_s - job.failed_s)
            job.failed_s = None
        defects = self._care.defects
        there = [(n, defects[n]) for n in job.nodes if n in defects and defects[n].active]
        self._set_speed(job)
        for node, defect in there:
            self._harm(job, node, defect)

    def _harm(self, job: Job, node: int, defect: Defect) -> None:
        """Let a defect do to a running script what it does."""
        version = job.version
        if defect.kind.effect is Effect.STOPS:
            self._strike(job, version, node, defect)
        elif defect.kind.effect is Effect.STRIKES:
            after_s = self._rng.expovariate(1 / (kinds.STRIKES_AFTER_H * 3600.0))
            self._clock.after(after_s, lambda: self._strike(job, version, node, defect))
        elif defect.kind.effect is Effect.SLOWS:
            self._care.met_by_job(node, defect)

    def _set_speed(self, job: Job) -> None:
        """Let the job go on as fast as its slowest node, and end when its work is done."""
        self._note_progress(job)
        job.version += 1
        version, defects = job.version, self._care.defects
        slowest = max(
            (
                defects[node].kind.slowdown
                for node in job.nodes
                if node in defects and defects[node].active
            ),
            default=1.0,
        )
        job.speed = 1 / slowest
        left_s = (job.left_s - job.progress_s) / job.speed
        self._clock.after(left_s, lambda: self._end(job, version))

    def _note_progress(self, job: Job) -> None:
        job.progress_s += (self._clock.now_s - job.running_s) * job.speed
        job.running_s = self._clock.now_s

    def _end(self, job: Job, version: int) -> None:
        if job.version != version:
            return
        self._tally.useful_s += job.left_s * job.size
        job.version += 1
        job.state = "ended"
        self._release(job)
        self._submit(job.slot, job.tier, job.size)
        self.schedule()

    # --- failures --------------------------------------------------------------------------

    def _on_fault(self, node: int, defect: Defect) -> None:
        job = self._care.owned[node]
        if not isinstance(job, Job) or node not in job.nodes:
            return
        if job.state == "running":
            if defect.kind.effect is Effect.SLOWS:
                running = [n for n in job.nodes if n in self._care.defects and n != node]
                self._set_speed(job)
                for other in running:  # what was to strike under the version before
                    if self._care.defects[other].active:
                        self._harm(job, other, self._care.defects[other])
            self._harm(job, node, defect)
        elif job.state == "loading" and defect.kind.effect is Effect.STOPS:
            self._strike(job, job.version, node, defect)

    def _on_lost(self, node: int, defect: Defect) -> None:
        job = self._care.owned[node]
        if not isinstance(job, Job):
            return
        if node in job.spares:
            self._keep(job, job.nodes, [spare for spare in job.spares if spare != node])
            return
        self._fail(job, node, defect, lost=True)

    def _strike(self, job: Job, version: int, node: int, defect: Defect) -> None:
        if job.version == version and self._care.defects.get(node) is defect:
            self._fail(job, node, defect, lost=False)

    def _fail(self, job: Job, node: int, defect: Defect, *, lost: bool) -> None:
        """End the script at a failure of this node; what follows depends on the policy."""
        self._tally.strikes += 1
        self._tally.twice += node in job.struck_by
        job.struck_by.add(node)
        if job.state == "running":
            self._note_progress(job)
            kept_s = job.progress_s // jobs.CHECKPOINT_S * jobs.CHECKPOINT_S
            self._tally.useful_s += kept_s * job.size
            self._tally.lost_s += (job.progress_s - kept_s) * job.size
            job.left_s -= kept_s
        job.version += 1
        job.state = "failed"
        if job.failed_s is None:
            job.failed_s = self._clock.now_s
        self._care.met_by_job(node, defect)
        if lost:
            self.on_spoiled(node, job, "lost")
        if not self._policy.keeps:
            self._leave(job, set())
        elif self._policy.rule is Rule.OURS:
            self._plan(job, node, defect, lost=lost)
        else:
            self._in_place(job, node, lost=lost)

    def _in_place(self, job: Job, node: int, *, lost: bool) -> None:
        """Start the script again where it was, without a node that is lost or was drained."""
        gone = lost or self._care.nodes[node].leaving
        if gone and not job.spares:
            self._leave(job, set())
            return
        if gone:
            nodes = [each for each in job.nodes if each != node] + [job.spares[0]]
            self._keep(job, nodes, job.spares[1:])
        self._load(job)

    def _plan(self, job: Job, node: int, defect: Defect, *, lost: bool) -> None:
        """Do what the real rules plan after a failure, as far as restarts are left."""
        job.restarts += 1
        if job.restarts > job.restarts_allowed:
            self._leave(job, {node} if lost else set())
            return
        drained = self._care.nodes[node].leaving  # a person has, or a test on the node
        named = not lost and (drained or self._rng.random() < defect.kind.named)
        plan = planned_of(job, node, named=named, lost=lost)
        guilty = {int(each.node) for each in plan.at_fault}
        for each in guilty:
            if not lost:
                self.on_spoiled(each, job, "accused")
                self._care.accused(each, job=id_of(job), uid=job.uid, slow=False)
        if plan.next is Next.CHECK and len(plan.check) >= job.size:
            left = [int(name) for name in plan.check]
            job.excluded |= guilty
            self._keep(job, left[: job.size], left[job.size :])
            self._check(job, plan.last_choice)
        else:
            self._leave(job, guilty)

    # --- nodes of a job --------------------------------------------------------------------

    def _keep(self, job: Job, nodes: Sequence[int], spares: Sequence[int]) -> None:
        """Let the job have these nodes only; the others are free, or leave the pool."""
        before = [*job.nodes, *job.spares]
        self._charge(job)
        job.nodes, job.spares = list(nodes), list(spares)
        kept = {*nodes, *spares}
        for node in before:
            if node not in kept:
                self._care.left_by_job(node)

    def _leave(self, job: Job, without: set[int], after_s: float = REQUEUE_S) -> None:
        """Requeue the job, not to come back to some nodes."""
        job.excluded |= without
        job.version += 1
        job.state = "queued"
        self._release(job)

        def again() -> None:
            self._queue[job.tier].appendleft(job)
            self.schedule()

        self._clock.after(after_s, again)
        self.schedule()

    def _release(self, job: Job) -> None:
        self._charge(job)
        for node in (*job.nodes, *job.spares):
            self._care.left_by_job(node)
        job.nodes, job.spares = [], []

    def _charge(self, job: Job) -> None:
        """Count the time that the job has had its nodes."""
        took_s = self._clock.now_s - job.since_s
        self._tally.allocated_s += took_s * (len(job.nodes) + len(job.spares))
        self._tally.spare_s += took_s * max(0, len(job.nodes) + len(job.spares) - job.size)
        job.since_s = self._clock.now_s

    def settle_all(self) -> None:
        """Count what runs at the end."""
        for job in self.jobs.values():
            if job.state == "running":
                self._note_progress(job)
                self._tally.useful_s += job.progress_s * job.size
            self._charge(job)
