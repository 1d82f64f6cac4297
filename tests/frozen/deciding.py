# SPDX-License-Identifier: Apache-2.0
"""What a job does about a verdict, a failed script, and a check that could not be made."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from msgspec import structs

from slurm_health.preflight.decide import check_again as again
from slurm_health.preflight.decide import unchecked as not_checked
from slurm_health.preflight.decide.decide import Decision, decide_unasked, exit_code, unwanted
from slurm_health.preflight.decide.decide import decide as decided_for
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.paths import ends_to_leave, one_of_a_lone_pair
from slurm_health.preflight.decide.policy import OnStraggler, OnUnchecked, Policy
from slurm_health.records.errors import (
    AllocationError,
    ConfigError,
    JournalBusy,
    JournalError,
    RecordTooNew,
    SlurmError,
    SlurmHealthError,
)
from slurm_health.records.records import Disposition, JobOutcome, VerdictReached
from slurm_health.records.script_records import Attribution, Diagnosed, EventKind, TrainingEvent
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.training.diagnosis.failure import JobAtFailure, what_follows
from slurm_health.training.framework import CheckNodes, LeaveNode

_LEVELS = {level.value[0]: level for level in Level}
# A letter for each node by its level; of slow ones the later are slower.
SCENES = (
    *("hhhh", "fhhh", "hfhh", "hhff", "hfff", "ffff", "shhh", "hhsh", "hssh", "hfsh", "ihhh"),
    *("hhhi", "hiih", "hfis", "iiii", "ssss"),
)


def verdict_of(levels: str, *links: tuple[str, str, Level, float]) -> VerdictReached:
    """Return the verdict on nodes n1, n2, ... of these levels, and on paths between them."""
    nodes = [
        NodeVerdict(
            node=f"n{number}",
            level=_LEVELS[letter],
            slowdown=1.2 + number / 10 if letter == "s" else 1.0,
            probability=0.995 if letter == "s" else 0.999,
            component="compute device 1" if letter == "s" else "network",
            reason="a reason",
            evidence=("round 1", "round 2"),
        )
        for number, letter in enumerate(levels, 1)
    ]
    paths = [
        LinkVerdict(ends=(one, other), level=level, slowdown=slowdown, reason="a path")
        for one, other, level, slowdown in links
    ]
    return VerdictReached(nodes=nodes, paths=paths)


USUAL = JobFacts(job_id=12, batch_node="n1", free=1000, needed=4)
FACTS = {
    "others at once": USUAL,
    "must wait": replace(USUAL, free=0),
    "batch host n2": replace(USUAL, batch_node="n2"),
    "2 requeues": replace(USUAL, requeues=2),
    "at its limit": replace(USUAL, requeues=3),
    "not to be requeued": replace(USUAL, no_requeue="it cannot be requeued"),
    "n2 by name": replace(USUAL, named=frozenset({"n2"})),
    "4 nodes of 5": replace(USUAL, candidates=frozenset({"n1", "n2", "n3", "n4", "n5"})),
    "gives nothing back": replace(USUAL, cannot_drop="Slurm refuses it"),
    "may drain": replace(USUAL, may_drain=True),
    "has drained n2": replace(USUAL, may_drain=True, drained=frozenset({"n2"})),
}
POLICIES = {
    "usual": Policy(),
    "report": Policy(on_straggler=OnStraggler.REPORT),
    "3 wanted": Policy(nodes_wanted=3),
    "3 wanted, 2 needed": Policy(nodes_wanted=3, nodes_needed=2),
    "2 wanted, spares kept": Policy(nodes_wanted=2, nodes_needed=2, keep_spares=True),
    "2 wanted, n1 and n3 last": Policy(nodes_wanted=2, nodes_needed=1, last_choice=("n1", "n3")),
}


def decide() -> Iterator[tuple[str, object]]:
    """Yield what is decided for each verdict under each policy, by what the job can do."""
    for levels, (asked, policy) in product(SCENES, POLICIES.items()):
        verdict = verdict_of(levels)
        yield f"{levels}, {asked}: exit code", int(exit_code(verdict))
        for known, facts in FACTS.items():
            yield f"{levels}, {asked}: {known}", shown(decided_for(verdict, policy, facts))
    for asked, requeues in product(("usual", "report"), range(4)):
        facts = replace(USUAL, requeues=requeues)
        key = f"a pair in doubt, {asked}: {requeues} requeues"
        yield key, shown(decided_for(verdict_of("ii"), POLICIES[asked], facts))
    for (name, links), asked in product(LINKS.items(), ("usual", "report", "3 wanted")):
        decision = decided_for(verdict_of("hhhh", *links), POLICIES[asked], USUAL)
        yield f"{name}, {asked}", shown(decision)
    for levels, (asked, policy) in product(SCENES, POLICIES.items()):
        verdict = verdict_of(levels)
        avoid = unwanted(verdict, policy, batch_node="n1")
        outcome = decide_unasked(verdict, avoid, "no answer")
        yield f"{levels}, {asked}: Slurm does not answer", _ended(outcome)


def shown(decision: Decision) -> str:
    """Return a decision as words: what is drained, who stays, who goes, how it ends."""
    words = [f"drain {drain.node} {drain.component}" for drain in decision.drain]
    if decision.left_alone[0]:
        words.append(f"leave alone {','.join(decision.left_alone[0])}")
    outcome, drop = decision.outcome, decision.drop[0]
    if drop or outcome.spares:
        words += [f"keep {','.join(outcome.nodes)}", f"drop {','.join(drop) or '-'}"]
        words += [f"spares {','.join(outcome.spares)}"] if outcome.spares else []
    return "; ".join([*words, _ended(outcome, *decision.leave, may_stay=decision.may_stay)])


def _ended(outcome: JobOutcome, *leave: str, may_stay: bool = False) -> str:
    words = [outcome.disposition.value, *leave, f"code {int(outcome.exit_code)}"]
    moves = outcome.disposition is Disposition.REQUEUE
    return " ".join([*words, *(["may stay"] if moves and may_stay else [])])


def drains() -> Iterator[tuple[str, object]]:
    """Yield how many faulty nodes are drained at most, by how many are bad at once."""
    facts = replace(USUAL, may_drain=True)
    for total, share in product((1, 2, 3, 4, 8, 64), (0.1, 0.25, 0.5)):
        most = 0
        for bad in range(1, total + 1):
            verdict = verdict_of("f" * bad + "h" * (total - bad))
            decision = decided_for(verdict, Policy(max_bad_share=share), facts)
            most = bad if not decision.left_alone[0] else most
        yield f"{total} nodes, share {share:g}: most at once", most


_BAD, _SLOW = Level.FAULTY, Level.SLOW
LINKS: dict[str, tuple[tuple[str, str, Level, float], ...]] = {
    "n1-n2 broken": (("n1", "n2", _BAD, 1.0),),
    "n2-n3 broken": (("n2", "n3", _BAD, 1.0),),
    "n2-n3 slow": (("n2", "n3", _SLOW, 1.7),),
    "n1-n2 and n1-n3 broken": (("n1", "n2", _BAD, 1.0), ("n1", "n3", _BAD, 1.0)),
    "n2-n3 and n3-n4 broken": (("n2", "n3", _BAD, 1.0), ("n3", "n4", _BAD, 1.0)),
    "n1-n2 and n3-n4 slow": (("n1", "n2", _SLOW, 1.3), ("n3", "n4", _SLOW, 1.9)),
    "all of n1 broken": tuple(("n1", other, _BAD, 1.0) for other in ("n2", "n3", "n4")),
    "a circle": tuple(
        (f"n{one}", f"n{other}", _BAD, 1.0) for one, other in ((1, 2), (2, 3), (3, 4), (1, 4))
    ),
    "in doubt": (("n2", "n3", Level.INCONCLUSIVE, 1.7),),
}


def paths() -> Iterator[tuple[str, object]]:
    """Yield which end of a bad path is left, by who is the batch host and who goes anyway."""
    for (name, links), batch, left, slow in product(
        LINKS.items(), ("n1", "n2", "n4"), ((), ("n2",)), (False, True)
    ):
        ends = ends_to_leave(verdict_of("hhhh", *links), left=left, batch_node=batch, slow=slow)
        key = f"{name}, batch host {batch}, {'without n2, ' if left else ''}slow matters: {slow}"
        yield key, {end.node: end.level.value for end in ends}
    for batch, one, other in product(("n1", "n2"), (0.1, 0.5), (0.1, 0.104, 0.3, 0.5)):
        pair = [
            structs.replace(node, probability=probability)
            for node, probability in zip(verdict_of("ii").nodes, (one, other), strict=True)
        ]
        found = one_of_a_lone_pair(VerdictReached(nodes=pair), batch_node=batch)
        key = f"a pair at {one:g} and {other:g}, batch host {batch}"
        yield key, [end.node for end in found]


_FAILED = Diagnosed(
    cause="a-cause", description="it failed", attribution=Attribution.USER, sureness="likely"
)
_DIAGNOSED = {
    "no post-mortem": None,
    **{whose.value: structs.replace(_FAILED, attribution=whose) for whose in Attribution},
    "node fault of n2": structs.replace(
        _FAILED, attribution=Attribution.NODE, sureness="certain", nodes=["n2"], accused=["n2"]
    ),
}


def _hang(cause: str, *nodes: str, located: bool = True) -> TrainingEvent:
    whose = Attribution.USER if cause == "mismatched-collective" else Attribution.UNDECIDED
    where = {"nodes": list(nodes), "ranks": [0]}
    name = cause if located else "no-progress"
    found = structs.replace(_FAILED, cause=name, attribution=whose, **where)
    hang = TrainingEvent(event=EventKind.HANG, step=3, stalled_s=60.0, usual_s=20.0)
    return structs.replace(hang, diagnosed=found, **where)


_HANGS: dict[str, tuple[TrainingEvent | None, tuple[TrainingEvent, ...]]] = {
    "no hang": (None, ()),
    "a hang on n2": (_hang("rank-stopped", "n2"), ()),
    "a hang on n1 and n2": (_hang("rank-stopped", "n1", "n2"), ()),
    "a hang on n1 to n3": (_hang("rank-stopped", "n1", "n2", "n3"), ()),
    "a hang of the script": (_hang("mismatched-collective", "n2"), ()),
    "a loader that hangs": (_hang("data-loader-stuck", "n2"), ()),
    "a hang without a place": (_hang("", located=False), ()),
    "a second one": (_hang("rank-stopped", "n2"), (_hang("rank-stopped", "n3"),)),
    "a third one": (_hang("rank-stopped", "n2"), (_hang("rank-stopped", "n3"),) * 2),
    "a third one of another kind": (
        _hang("rank-stopped", "n2"),
        (_hang("rank-gone", "n3"), _hang("rank-stopped", "n3")),
    ),
    "a second one without a place": (_hang("", located=False), (_hang("", located=False),)),
}


def after_failure() -> Iterator[tuple[str, object]]:
    """Yield what follows a failed script, by why it failed and what was known before."""
    base = JobAtFailure(batch_node="n1", nodes=("n1", "n2", "n3", "n4"), spares=("n5",))
    replace = structs.replace
    situations = {
        "first time": base,
        "restarted before": replace(base, restarted_unchecked=True),
        "may shrink to 4": replace(base, least=4),
        "may shrink to 5": replace(base, least=5),
        "n3 lost, may shrink to 3": replace(base, lost=(("n3", "DOWN"),), least=3),
        "n1 lost, may shrink to 3": replace(base, lost=(("n1", "DOWN"),), least=3),
        "job over": replace(base, job_over="CANCELLED"),
    }
    for (why, diagnosed), (known, failure), (hung, (hang, before)) in product(
        _DIAGNOSED.items(), situations.items(), _HANGS.items()
    ):
        action = what_follows(diagnosed, replace(failure, hang=hang, hangs_before=before))
        checks = action.nodes if isinstance(action, CheckNodes) else ()
        at_fault = action.at_fault if isinstance(action, CheckNodes | LeaveNode) else ()
        last = action.last_choice if isinstance(action, CheckNodes) else ()
        text = f"{action.kind} check {','.join(checks) or '-'}"
        text += f" at fault {','.join(verdict.node for verdict in at_fault) or '-'}"
        yield f"{why}, {known}, {hung}", f"{text} last {','.join(last) or '-'}"


def check_again() -> Iterator[tuple[str, object]]:
    """Yield which check is made before a restart, by what was asked for and how long it took."""
    for asked, took_s in product(
        (None, "auto", "off", "quick", "thorough", "light", "gpt", "matmul,allgather"),
        (None, 10.0, 119.0, 120.0, 121.0, 200.0, 241.0),
    ):
        found = again.check_again(asked, took_s)
        yield f"{asked}, took {took_s}", [found.check, bool(found.less)]


_PATH = Path("/journal")
_ERRORS: dict[str, SlurmHealthError] = {
    "a newer record": RecordTooNew(_PATH, version=2, known=1),
    "a busy journal": JournalBusy(_PATH),
    "a journal": JournalError(_PATH, "x"),
    "a journal by an option": JournalError(_PATH, "name one with --journal"),
    "Slurm": SlurmError("x"),
    "an allocation": AllocationError("x", "y"),
    "settings": ConfigError("a file", "key", "x"),
    "another": SlurmHealthError("x"),
}


def unchecked() -> Iterator[tuple[str, object]]:
    """Yield what becomes of a job whose nodes could not be checked."""
    for (name, err), choice in product(_ERRORS.items(), OnUnchecked):
        outcome = not_checked.outcome(not_checked.unchecked_by(err), choice)
        yield f"{name}, {choice.value}", _ended(outcome)
