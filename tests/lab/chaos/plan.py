# SPDX-License-Identifier: Apache-2.0
"""What one run does, chosen from its seed: the job, its bad nodes, what goes wrong, and when.

A moment is an event that the journal or Slurm shows, not a time, so that a run goes the same way on
a machine of another speed. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TypeVar

Choice = TypeVar("Choice")
NODES = ("n1", "n2", "n3", "n4", "n5", "n6")


class Deed(StrEnum):
    """What may happen in a run: somebody is killed (SIGKILL), or a person types a command."""

    KILL_MASTER = "kill master"
    KILL_AGENT = "kill agent"
    KILL_WORKER = "kill worker"
    KILL_SRUN = "kill srun"
    KILL_SUPERVISOR = "kill supervisor"
    KILL_HELPER = "kill helper"
    KILL_SLURMCTLD = "kill slurmctld"
    KILL_SLURMD = "kill slurmd"
    CANCEL = "cancel"
    REQUEUE = "requeue"
    HOLD = "hold"
    RELEASE = "release"
    HEALTH_CHECK = "health check"
    KILL_RANK = "kill rank"
    LOSE_NODE = "lose"  # slurmd and all that the script has there; it does not come back
    TIME_LIMIT = "time limit"  # its end comes now; Slurm looks for such jobs every 30 s
    PREEMPT = "preempt"  # a job of another user, in a partition that goes first, takes a node


WHILE_IT_TRAINS = (Deed.KILL_RANK, Deed.LOSE_NODE)
# What ends an attempt from outside, at any moment.
ENDINGS = (Deed.CANCEL, Deed.TIME_LIMIT, Deed.PREEMPT)
ON_A_NODE = frozenset(
    {*WHILE_IT_TRAINS, Deed.KILL_AGENT, Deed.KILL_WORKER, Deed.KILL_SLURMD, Deed.HEALTH_CHECK}
)
# How often each is chosen. What ends the job ends the run, too.
_APART = (*WHILE_IT_TRAINS, Deed.TIME_LIMIT, Deed.PREEMPT)
_DEEDS = dict.fromkeys([deed for deed in Deed if deed not in _APART], 3) | {
    Deed.KILL_MASTER: 5,
    Deed.CANCEL: 1,
    Deed.KILL_SUPERVISOR: 1,
}

# What Slurm shows of the job, and kinds of record in the journals of all its checks. Only a job
# with a bad node moves.
SUBMITTED, RUNNING, HELD = "submitted", "running", "held"
_CHECKING = (
    "run_started",
    "agents_launched",
    "nodes_admitted",
    "round_started",
    "round_ended",
    "verdict_reached",
)
_MOVING = ("action_intended", "action_done", HELD)
_SUITED = {
    Deed.KILL_HELPER: _MOVING,
    Deed.RELEASE: _MOVING,
    Deed.KILL_AGENT: _CHECKING,
    Deed.KILL_WORKER: _CHECKING,
    Deed.KILL_SRUN: _CHECKING,
}
_MOVED = frozenset({Deed.KILL_HELPER, Deed.RELEASE})

# How `tests/support/fake_worker.py` plays a node, and how often. The first few are a node's fault.
DIES, RAISES, UNREACHABLE, SLOW = "dies", "raises", "unreachable", "slow"
_PLAYED = {DIES: 4, UNREACHABLE: 3, RAISES: 2, SLOW: 2, "cannot": 1, "broken-torch": 1, "stuck": 1}
FAULTS = frozenset({DIES, RAISES, UNREACHABLE})
# How often an attempt is ended from outside beside all else, and by what.
_ENDED = 0.4
_ENDING = {Deed.CANCEL: 2, Deed.TIME_LIMIT: 1, Deed.PREEMPT: 2}
# So long after its moment at most: longer than a round of played probes.
_LATER_S = 1.5
# What Slurm does to a preempted job, and how long it leaves it after SIGTERM.
_PREEMPT_MODES, _GRACE_S = ("REQUEUE", "CANCEL"), (0, 0, 5)
# How often nothing dies of a script that may be started again.
_NO_DEATH = 0.15
# With fewer nodes nobody can tell who does not reach whom.
_TELLING = 3

_CHOICES = {
    "--max-requeues": ("0", "1", "2"),
    "--on-straggler": ("report", "exclude"),
    "--comment": ("mine",),
    "--ntasks-per-node": ("2",),
}
_FLAGS = ("--no-requeue", "--exclusive")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that happens at the `nth` time that an event is seen, or as soon after it can.

    Where `later_s` is set, it happens so long after that.
    """

    deed: Deed
    event: str
    nth: int = 1
    node: str = ""
    later_s: float = 0.0

    def __str__(self) -> str:
        nth = f" {self.nth}" if self.nth > 1 else ""
        when = f"{self.later_s:g} s after" if self.later_s else "at"
        return f"{self.deed} {self.node}".strip() + f" {when} {self.event}{nth}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    `played` says how bad nodes behave in the check. A `hidden` fault shows in a retest only, so the
    epilog confirms what the check found; a `flagged` node fails its prolog. `restarts` is how often
    an attempt may start the script again. `preempt_mode` and `grace_s` are the cluster's, where a
    job is preempted.
    """

    seed: int
    user: str
    nodes: int
    least: int
    spares: int
    options: tuple[str, ...]
    played: Mapping[str, str]
    hidden: frozenset[str]
    flagged: frozenset[str]
    troubles: tuple[Trouble, ...]
    restarts: int = 0
    preempt_mode: str = ""
    grace_s: int = 0

    @property
    def is_timed_out(self) -> bool:
        return any(each.deed is Deed.TIME_LIMIT for each in self.troubles)

    @property
    def loses_a_node(self) -> bool:
        return any(each.deed is Deed.LOSE_NODE for each in self.troubles)

    @property
    def words(self) -> tuple[str, ...]:
        spares = (f"--spares={self.spares}",) if self.spares else ()
        nodes = f"{self.least}-{self.nodes}" if self.least < self.nodes else str(self.nodes)
        return (f"--nodes={nodes}", *spares, *self.options)

    def __str__(self) -> str:
        bad = [f"{node} {how}" for node, how in self.played.items()]
        bad += [f"{node} hides a fault" for node in sorted(self.hidden)]
        bad += [f"{node} fails its prolog" for node in sorted(self.flagged)]
        said = ", ".join(bad) or "all nodes well"
        troubles = ", ".join(str(each) for each in self.troubles) or "no trouble"
        mode = f"; PreemptMode={self.preempt_mode}" if self.preempt_mode else ""
        mode += f" GraceTime={self.grace_s}" if self.grace_s else ""
        return f"{self.user}: {' '.join(self.words)}; {said}; {troubles}{mode}"


def plan_of(seed: int) -> Plan:
    """Return what the run of a seed does: always the same."""
    # What concerns a script that is started again is drawn apart from the rest.
    random, training = Random(seed), Random(f"{seed} training")
    restarts = training.choice((0, 1, 1, 2))
    nodes = random.randint(2, 5)
    fits = random.random() < 0.5  # spares and ranges go with neither of the other kinds of request
    spares = random.choice((0, 1, 1, 2)) if fits else 0
    # Whoever may start again has use for one.
    spares = min(max(spares, 1) if fits and restarts else spares, len(NODES) - nodes)
    least = random.randint(max(2, nodes - 1), nodes) if fits else nodes
    # Slurm gives out the first ones first.
    near = NODES[: min(nodes + spares + 1, len(NODES))]
    bad = random.sample(near, random.choice((0, 1, 1, 2)))
    suited = {how: weight for how, weight in _PLAYED.items() if _suits(how, nodes)}
    played = {node: _chosen(random, suited) for node in sorted(bad)}
    faulty = [node for node, how in played.items() if how in FAULTS]
    well = [node for node in near if node not in played]
    going_on = [f"--max-restarts={restarts}"] if restarts else []
    plan = Plan(
        seed=seed,
        user="root" if random.random() < 0.25 else "alice",
        nodes=nodes,
        least=least,
        spares=spares,
        options=(*_options(random), *going_on),
        played=played,
        hidden=frozenset(node for node in faulty if random.random() < 0.4),
        flagged=frozenset(random.sample(well, 1)) if random.random() < 0.15 else frozenset(),
        troubles=_troubles(random, near, moves=bool(faulty)),
        restarts=restarts,
    )
    mortal = tuple(node for node in well[1:nodes] if node not in plan.flagged)
    plan = replace(plan, troubles=plan.troubles + _deaths(training, mortal, restarts))
    return _with_ending(plan, Random(f"{seed} ending"), moves=bool(faulty))


def _with_ending(plan: Plan, random: Random, *, moves: bool) -> Plan:
    """Choose what ends an attempt from outside, if anything does: drawn apart from the rest."""
    if random.random() >= _ENDED:
        return plan
    deed = _chosen(random, _ENDING)
    moments = (RUNNING, *_CHECKING, "script_started", *(_MOVING if moves else ()))
    event = random.choice(moments)
    ending = Trouble(
        deed=deed,
        event=event,
        nth=random.choice((1, 2, 3)) if event.startswith("round_") else 1,
        later_s=round(random.uniform(0, _LATER_S), 2),
    )
    others = tuple(each for each in plan.troubles if each.deed is not deed)
    plan = replace(plan, troubles=(*others, ending))
    if deed is not Deed.PREEMPT:
        return plan
    mode, grace_s = random.choice(_PREEMPT_MODES), random.choice(_GRACE_S)
    return replace(plan, preempt_mode=mode, grace_s=grace_s)


def _deaths(random: Random, nodes: tuple[str, ...], restarts: int) -> tuple[Trouble, ...]:
    """Choose what dies while the script trains, once in each of its first starts.

    Never the first node, and nothing on a node that is lost by then.
    """
    if not restarts or random.random() < _NO_DEATH:
        return ()
    deaths: list[Trouble] = []
    left = list(nodes)
    for nth in range(1, random.randint(1, restarts + 1) + 1):
        if left:
            deed, node = random.choice(WHILE_IT_TRAINS), random.choice(left)
            deaths.append(Trouble(deed=deed, event="script_started", nth=nth, node=node))
            if deed is Deed.LOSE_NODE:
                left.remove(node)
    return tuple(deaths)


def _suits(how: str, nodes: int) -> bool:
    return how != UNREACHABLE or nodes >= _TELLING


def _options(random: Random) -> tuple[str, ...]:
    chosen = [
        f"{name}={random.choice(values)}"
        for name, values in _CHOICES.items()
        if random.random() < 0.25
    ]
    return (*chosen, *(flag for flag in _FLAGS if random.random() < 0.1))


def _troubles(random: Random, nodes: tuple[str, ...], *, moves: bool) -> tuple[Trouble, ...]:
    moments = (SUBMITTED, RUNNING, *_CHECKING, "job_outcome", "script_started")
    deeds = {deed: weight for deed, weight in _DEEDS.items() if moves or deed not in _MOVED}
    troubles: dict[tuple[Deed, str], Trouble] = {}
    for _ in range(random.choice((0, 1, 1, 2, 2, 3))):
        deed = _chosen(random, deeds)
        node = random.choice(nodes) if deed in ON_A_NODE else ""
        event = random.choice(_SUITED.get(deed, (*moments, *_MOVING) if moves else moments))
        nth = random.choice((1, 2, 3)) if event.startswith("round_") else 1
        # Twice on the same node may be a fault of the node.
        troubles[deed, node] = Trouble(deed=deed, event=event, nth=nth, node=node)
    return tuple(troubles.values())


def _chosen(random: Random, weights: Mapping[Choice, int]) -> Choice:
    return random.choices(list(weights), list(weights.values()))[0]
