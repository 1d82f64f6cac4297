# SPDX-License-Identifier: Apache-2.0
"""A node from its fault to its return: who notices, who drains it, how it comes back.

Real are the breaker, the marks, the recovery after a drain. Played are the faults, the tests and
the persons.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.year import kinds
from benchmarks.year.clock import Clock
from benchmarks.year.kinds import Effect, Kind
from benchmarks.year.measures import Tally
from benchmarks.year.policies import Policy
from benchmarks.year.pool import Pool
from benchmarks.year.recording import History, Stay
from slurm_health.node.rules import accusations
from slurm_health.node.rules.breaker import DrainEntry, DrainLedger, DrainRefused, reserve
from slurm_health.node.rules.mending import burns_in
from slurm_health.node.rules.recovery import DrainRecord, after_test, is_due

PARTITION = "gpu"
# How long a person takes to find a node that fails jobs, where nothing names it, and one that is
# only slow; a logarithm's deviation of 1. Assumed: "hours to days" of C4 (arXiv:2406.04594).
PERSON_S, PERSON_SLOW_S, PERSON_SPREAD = 4 * 3600.0, 24 * 3600.0, 1.0
LOOK_S = 4 * 3600.0  # a person looks at a node that is out, and finds nothing
HEALTH_CHECK_S = 300.0
STRESS_EVERY_S = 3600.0  # of a burn-in
# Drains for what a check of the node finds, which the health check repeats; after marks and after
# a test with partners a person brings it back (docs/admin/policy.md).
_RETESTED = frozenset({"health check", "epilog"})


@dataclass(eq=False)
class Defect:
    """What is wrong with a node, from when on, and who has met it.

    `seen` places it among the faults of its kind: a test that sees a share sees those below it.
    Before it is `active`, it harms no job: a repair has left it.
    """

    stay: Stay
    kind: Kind
    seen: float
    active: bool = False
    met: str = ""
    person: bool = False


@dataclass
class Node:
    """What is known of one node. `out` is why it is out of the pool, empty if it is in.

    `retested`: a check of its own drained it, and brings it back; of all others a person does.
    """

    history: History
    place: int = 0
    out: str = ""
    leaving: bool = False
    retested: bool = False
    probation_until_s: float = 0.0
    marks: tuple[accusations.NodeMark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What all parts of one year share. `person` is how long persons take, of what is assumed."""

    policy: Policy
    clock: Clock
    pool: Pool
    tally: Tally
    seed: int
    person: float = 1.0


class Care:
    """All nodes, their faults and their repairs.

    `owned` has the job that each node is in. `on_fault` is told of each fault that begins to harm,
    `on_lost` of each node that Slurm loses, `on_out` of each that leaves the pool.
    """

    def __init__(
        self, histories: Sequence[History], table: Mapping[str, Kind], cluster: Cluster
    ) -> None:
        self.nodes = [Node(history=history) for history in histories]
        self.defects: dict[int, Defect] = {}
        self.owned: list[object | None] = [None] * len(histories)
        self.on_fault: Callable[[int, Defect], None] = lambda *_: None
        self.on_lost: Callable[[int, Defect], None] = lambda *_: None
        self.on_out: Callable[[int], None] = lambda _: None
        self._table, self._cluster = table, cluster
        self._policy = cluster.policy
        self._clock, self._pool, self._tally = cluster.clock, cluster.pool, cluster.tally
        self._rng = random.Random(f"care {cluster.seed}")
        self._ledger = DrainLedger()
        self._everybody = frozenset(map(_name, range(len(histories))))
        self._ours: set[str] = set()
        for node in range(len(histories)):
            self._await_fault(node)

    # --- faults ----------------------------------------------------------------------------

    def _await_fault(self, node: int) -> None:
        known = self.nodes[node]
        if known.place >= len(known.history):
            return
        stay, place = known.history[known.place], known.place
        kind = self._table[kinds.kind_of(stay.what)]
        if stay.again and kind.effect not in {Effect.NONE, Effect.LOST}:
            self.defects[node] = self._defect(node, stay, kind)
        self._clock.after(stay.well_s, lambda: self._fault(node, place, stay, kind))

    def _defect(self, node: int, stay: Stay, kind: Kind) -> Defect:
        place = random.Random(f"seen {self._cluster.seed} {node} {self.nodes[node].place}")
        return Defect(stay=stay, kind=kind, seen=place.random())

    def _fault(self, node: int, place: int, stay: Stay, kind: Kind) -> None:
        if self.nodes[node].place != place:
            return  # it was found and repaired before
        defect = self.defects.setdefault(node, self._defect(node, stay, kind))
        defect.active = True
        self._tally.faults += 1
        if kind.effect is Effect.LOST:
            self.on_lost(node, defect)
            self.take_out(node, "down")
        elif kind.effect is Effect.NONE:
            self.take_out(node, "board")
        else:
            self.on_fault(node, defect)
            if self._policy.local and self.shows(node, "local"):
                after_s = self._rng.uniform(0, HEALTH_CHECK_S)
                self._clock.after(after_s, lambda: self._found_by_health_check(node, defect))

    def _found_by_health_check(self, node: int, defect: Defect) -> None:
        if self.defects.get(node) is defect:
            self.drain(node, "health check")

    def shows(self, node: int, test: str) -> bool:
        """Tell whether a test of this name ("local", "check", "stress") finds the node's defect."""
        defect = self.defects.get(node)
        if defect is None or defect.seen >= getattr(defect.kind, test):
            return False
        if not defect.active:
            return test != "local" and self._rng.random() < kinds.SHOWS_LATENT
        return defect.kind.effect is not Effect.STRIKES or self._rng.random() < kinds.SHOWS

    def met_by_job(self, node: int, defect: Defect) -> None:
        """Note that a job has met a defect; a person begins to look for it."""
        if not defect.met:
            defect.met = "job"
        self._seek(node, defect)
        if self._policy.local and self.shows(node, "local"):
            self.drain(node, "epilog")

    def found_by_sweep(self, node: int) -> None:
        """Let a person read what a sweep says of a node, and drain it."""
        defect = self.defects.get(node)
        if defect is not None:
            self._note_test(defect)
            self._person(node, defect, PERSON_S)

    def _seek(self, node: int, defect: Defect) -> None:
        """Let a person look for a node that has spoiled a job; named or not, it takes as long."""
        if not defect.person:
            defect.person = True
            typical_s = PERSON_SLOW_S if defect.kind.effect is Effect.SLOWS else PERSON_S
            self._person(node, defect, typical_s)

    def _person(self, node: int, defect: Defect, typical_s: float) -> None:
        def finds() -> None:
            if self.defects.get(node) is defect and not self.nodes[node].out:
                self._tally.persons += 1
                self.take_out(node, "person")

        took_s = typical_s * self._rng.lognormvariate(0, PERSON_SPREAD)
        self._clock.after(took_s * self._cluster.person, finds)

    def _note_test(self, defect: Defect) -> None:
        if not defect.met:
            defect.met = "test"

    # --- accusations and drains ------------------------------------------------------------

    def accused(self, node: int, *, job: int, uid: int, slow: bool) -> None:
        """Let the node's epilog read that a check calls it bad; only a test of its own drains."""
        defect = self.defects.get(node)
        if defect is None:
            self._tally.accused_innocent += 1
        else:
            self._note_test(defect)
            self._seek(node, defect)
        if not self._policy.local:
            return
        if self.shows(node, "local"):
            self.drain(node, "epilog", job=job, uid=uid)
        elif self._policy.pair_test:
            if self.shows(node, "check"):
                self.drain(node, "pair-test", job=job, uid=uid)
            else:
                self.nodes[node].marks = ()
        elif not slow:
            self._mark(node, job, uid)

    def _mark(self, node: int, job: int, uid: int) -> None:
        known, settings = self.nodes[node], self._policy.marks
        mark = accusations.NodeMark(
            job=job, uid=uid, component="network", text="failed", time_s=self._clock.now_s
        )
        known.marks = accusations.add(known.marks, mark, settings)
        if accusations.convict(known.marks, settings):
            self.drain(node, "marks", job=job, uid=uid)

    def drain(self, node: int, check: str, *, job: int = 0, uid: int = -1) -> None:
        """Drain a node if the breaker lets that happen."""
        known = self.nodes[node]
        if known.out or known.leaving:
            return
        wanted = DrainEntry(
            node=_name(node),
            time_s=self._clock.now_s,
            partitions=(PARTITION,),
            job=job,
            uid=uid,
            checks=(check,),
        )
        decided = reserve(
            self._ledger,
            wanted,
            limits=self._policy.breaker,
            members={PARTITION: self._everybody},
            ours=self._ours,
        )
        if isinstance(decided, DrainRefused):
            self._tally.refused += 1
            if decided.ledger.trips and not self._ledger.trips:
                self._tally.trips += 1
                self._clock.after(LOOK_S, self._reset)
            self._ledger = decided.ledger
            return
        self._ledger = decided.ledger
        self._ours.add(_name(node))
        self._tally.drains += 1
        known.retested = check in _RETESTED
        defect = self.defects.get(node)
        if defect is not None:
            self._note_test(defect)
        self.take_out(node, check)

    def _reset(self) -> None:
        """Let a person see that the nodes have nothing in common, and reset the breaker."""
        self._ledger = DrainLedger(entries=())

    # --- out, and back ---------------------------------------------------------------------

    def take_out(self, node: int, why: str) -> None:
        """Take a node out of the pool as soon as no job is on it."""
        known = self.nodes[node]
        if known.out:
            return
        if self.owned[node] is not None:
            known.leaving = True
            return
        known.leaving, known.out = False, why
        self._pool.remove(node)
        self.on_out(node)
        defect = self.defects.get(node)
        if defect is None:
            self._tally.false_drains += 1
            self._tally.withheld_s += LOOK_S
            self._clock.after(LOOK_S, lambda: self._back(node))
        else:
            self._clock.after(defect.stay.repair_s, lambda: self._repaired(node))

    def renew(self, node: int, after_s: float) -> None:
        """Take a lemon out for a repair that ends its relapses."""
        known = self.nodes[node]
        if known.out or known.leaving or self.owned[node] is not None:
            return
        self._tally.lemons += 1
        if node not in self.defects:
            self._tally.withheld_s += after_s
        known.out = "lemon"
        self._pool.remove(node)
        self.on_out(node)

        def renewed() -> None:
            self._settle(node)
            known.place += 1
            while known.place < len(known.history) and known.history[known.place].relapse:
                known.place += 1
            self._to_pool(node)

        self._clock.after(after_s, renewed)

    def left_by_job(self, node: int) -> None:
        """Let a node be free again, or leave the pool if it was to."""
        self.owned[node] = None
        if self.nodes[node].leaving:
            self.take_out(node, "drained")
        else:
            self._pool.give(node)

    def _settle(self, node: int) -> None:
        """Count who met the node's defect, which is over."""
        defect = self.defects.pop(node, None)
        if defect is None:
            return
        if not defect.met:
            self._tally.relapses_by_nobody += defect.stay.relapse and defect.active
            return
        relapse, by_test = defect.stay.relapse, defect.met == "test"
        self._tally.by_test += by_test
        self._tally.by_job += not by_test
        self._tally.relapses_by_test += relapse and by_test
        self._tally.relapses_by_job += relapse and not by_test

    def _repaired(self, node: int) -> None:
        self._settle(node)
        self.nodes[node].place += 1
        self._to_pool(node)

    def _to_pool(self, node: int) -> None:
        """Start the node's next stay, first with the tests that it has to pass."""
        self._await_fault(node)
        known = self.nodes[node]
        known.marks = ()
        tested_s = self._recovery_s() if known.retested else 0.0
        burn_s = self._burn_in_s() if known.retested or self._policy.persons_burn_in else 0.0
        until_s = self._clock.now_s + tested_s + burn_s
        self._tally.withheld_s += until_s - self._clock.now_s
        if burn_s:
            self._burn_in(node, until_s)
        else:
            self._clock.at(until_s, lambda: self._back(node))

    def _recovery_s(self) -> float:
        """Return how long the real rule of recovery takes from the first pass to the return."""
        settings, now_s = self._policy.recovery, 0.0
        record = DrainRecord(node="n0", reason="", retest=("gpu",), time_s=0.0)
        while settings.release and not is_due(record, settings):
            now_s += max(settings.apart_s, 1.0)
            record = after_test(record, all_passed=True, now_s=now_s, settings=settings)
        return now_s

    def _burn_in_s(self) -> float:
        mend = self._policy.mend
        return mend.burn_in_h * 3600.0 if burns_in(mend) else 0.0

    def _burn_in(self, node: int, until_s: float) -> None:
        """Work the node under full load, hour after hour, or out again for what that shows."""
        if self.shows(node, "stress"):
            defect = self.defects[node]
            self._note_test(defect)
            self.nodes[node].retested = False  # what has failed under load waits for a person
            self._tally.withheld_s -= until_s - self._clock.now_s
            self._clock.after(defect.stay.repair_s, lambda: self._repaired(node))
            return
        if self._clock.now_s + STRESS_EVERY_S >= until_s:
            self._clock.at(until_s, lambda: self._back(node))
        else:
            self._clock.after(STRESS_EVERY_S, lambda: self._burn_in(node, until_s))

    def _back(self, node: int) -> None:
        known = self.nodes[node]
        known.out, known.retested = "", False
        self._ours.discard(_name(node))
        known.probation_until_s = self._clock.now_s + self._policy.probation_d * 86400.0
        self._pool.give(node)
        defect = self.defects.get(node)
        if (
            defect is not None
            and defect.active
            and defect.kind.effect in {Effect.NONE, Effect.LOST}
        ):
            self.take_out(node, "board")

    def settle_all(self) -> None:
        """Count what is still open at the end."""
        for node in list(self.defects):
            self._settle(node)


def _name(node: int) -> str:
    return f"n{node:05d}"
