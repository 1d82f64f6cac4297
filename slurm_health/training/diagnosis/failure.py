# SPDX-License-Identifier: Apache-2.0
"""The action after a failed script: it starts again, stops, leaves a node, or nodes are checked.

Only evidence blames a node here. If the evidence is undecided, the check of the nodes decides, and
`preflight.decide` acts on its verdict. A job that a person or a limit ended stays ended; a user's
error is never retried and blames no node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import (
    SCRIPT_FAILED,
    Attribution,
    Diagnosed,
    FailurePlanned,
    TrainingEvent,
)
from slurm_health.records.text import signal_text
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.sentences import hung_text
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.diagnosis.diagnostician import diagnosed
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.framework import (
    CheckNodes,
    DataManager,
    DiagnosisAction,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    Inference,
    LeaveNode,
    NoAction,
    RestartRanks,
    StopJob,
)

# A verdict needs a figure, which no statistics back here: `likely` must stay below the 99 % that
# measured rounds can reach.
_PROBABILITY = {"possible": 0.5, "likely": 0.9, "certain": 0.99}
# Faults that a later check cannot reproduce: Slurm's own trouble with a node, and memory that
# failed once.
UNSEEN_BY_CHECKS = frozenset({"node-lost", "memory-broken", "launch-refused", "launch-failed"})
_MOST_OF_A_KIND = 2  # restarts after hangs of one cause that blames no node
_LOOP = 3  # starts in a row, none of which came further than the first of them
_TIMES = re.compile(r"\d{4}[-/]\d\d[-/]\d\d|\d+(?::\d+)+[.,\d]*")


class JobAtFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose script has failed, its nodes and its history.

    Args:
        batch_node: the node that the job cannot be without.
        nodes: the nodes that the script ran on.
        job_over: Slurm's state of a job that no longer runs, else empty.
        spares: nodes that the job keeps beside these.
        lost: nodes of both that Slurm has lost and taken out of the job, with its reason.
        restarted_unchecked: this start of the job has restarted the script before without a check.
        least: the fewest nodes with which the job goes on; None if it has to be requeued instead.
        hang: the hang for which this start of the script was ended, None if it ended otherwise.
        hangs_before: those for which earlier starts of it in this attempt of the job were ended.
        before: the conclusions of the post-mortems of earlier starts in this job, oldest first.
        checked: those of them after which a check judged all nodes healthy, and since which the
            job has left no node: a node that a check judged faulty explains earlier failures.
        steps: the last step of every start so far, by the monitor, this one last; 0: unknown.
        saved: by start, the last line of its output that names a checkpoint; empty: none.
    """

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
    checked: tuple[Diagnosed, ...] = ()
    steps: tuple[int, ...] = ()
    saved: tuple[str, ...] = ()


class FailureNodeDiagnostician(Diagnostician):
    """Leaves a broken node: one that Slurm lost, or that the post-mortem accuses."""

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return the nodes at fault, None without any."""
        verdicts = _at_fault(kwargs["data_manager"])
        if not verdicts:
            return None
        return DiagnosisObservation(
            "node-failed", {verdict.node: verdict.reason for verdict in verdicts}
        )

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Return how the job goes on without them, or that it stops: it takes its failure along."""
        data: DataManager = kwargs["data_manager"]
        job, cause, verdicts = data.get(JobAtFailure), data.get(Diagnosed), _at_fault(data)
        assert job is not None
        alike = [earlier for earlier in job.before if cause and _alike(earlier, cause)]
        left = sorted({node for earlier in alike for node in earlier.accused})
        if cause and left and not job.lost and not set(left) & set(cause.accused):
            return StopJob(
                reason=f"{cause.description}: the same as on {fold(left)}, which the job left for"
                " that reason; it follows the job, not a node",
                evidence=tuple(cause.evidence),
            )
        stay = tuple(node for node in (*job.nodes, *job.spares) if node not in problem.details)
        reason = "; ".join(f"{node}: {why}" for node, why in problem.details.items())
        evidence = tuple(dict.fromkeys(line for verdict in verdicts for line in verdict.evidence))
        without = tuple(problem.details)
        if job.batch_node in without or job.least is None or len(stay) < job.least:
            return LeaveNode(reason=reason, nodes=without, evidence=evidence, at_fault=verdicts)
        return CheckNodes(
            reason=f"{reason}; the script is to go on without {fold(sorted(without))}",
            nodes=stay,
            evidence=evidence,
            at_fault=verdicts,
        )


class FailureDiagnostician(Diagnostician):
    """Concludes why a script failed, unless a conclusion exists; and what follows in its job."""

    operators = OPERATORS

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return that a script failed, None if it ended well or its end is unknown.

        A script that ended well on request is a problem: its job may have been ended.
        """
        data: DataManager = kwargs["data_manager"]
        if data.get(Diagnosed) is not None or data.get(ScriptEnd) is None:
            return DiagnosisObservation(SCRIPT_FAILED) if data.get(JobAtFailure) else None
        symptom = observe_failure(data)
        return None if symptom is None else DiagnosisObservation(SCRIPT_FAILED, symptom=symptom)

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Return the record; with a `JobAtFailure`, the action of the job."""
        data: DataManager = kwargs["data_manager"]
        cause, job = data.get(Diagnosed), data.get(JobAtFailure)
        if problem.symptom is not None:
            cause = diagnosed(self.walk(problem.symptom, data), data)
            data.store(cause)
        if job is None:
            return EventAction(diagnosed=cause)
        evidence = tuple(cause.evidence) if cause else ()
        what = cause.description if cause else "no post-mortem says why"
        if job.job_over:
            return StopJob(reason=f"Slurm calls the job {job.job_over}", diagnosed=cause)
        if cause and cause.attribution == Attribution.OUTSIDE:
            return StopJob(reason=what, evidence=evidence, diagnosed=cause)
        of_node = FailureNodeDiagnostician().diagnose(data_manager=data)
        if not isinstance(of_node, NoAction) or of_node.failed:
            return of_node
        if cause and cause.attribution == Attribution.USER:
            reason = f"{what} ({Attribution.USER}): the same again would fail again"
            return StopJob(reason=reason, evidence=evidence, diagnosed=cause)
        loop = job.steps[-_LOOP:]
        # A script may count its steps anew: what it saves tells such starts apart, not when.
        first, *later = (_TIMES.sub("", line) for line in job.saved[-_LOOP:] or ("",))
        saves = any(line and line != first for line in later)
        if len(loop) == _LOOP and all(loop) and max(loop[1:]) <= loop[0] and not saves:
            reason = f"{what}; {_LOOP} starts in a row came no further than step {loop[0]}"
            reason += " and saved no other checkpoint"
            return StopJob(reason=reason, evidence=evidence, diagnosed=cause)
        if job.hang is not None:
            return _after_hang(job.hang, job, evidence)
        passing = cause is not None and cause.attribution == Attribution.TRANSIENT
        if cause and evidence and not passing and _is_known(cause, job.checked):
            reason = f"{what}; it failed in these words before, and a check has judged its nodes"
            return StopJob(reason=f"{reason} healthy since", evidence=evidence, diagnosed=cause)
        if passing:
            if not job.restarted_unchecked:
                reason = f"{what} ({Attribution.TRANSIENT})"
                return RestartRanks(reason=reason, evidence=evidence, diagnosed=cause)
            what += "; it is not the first time"
        nodes = (*job.nodes, *job.spares)
        return CheckNodes(reason=what, nodes=nodes, evidence=evidence, diagnosed=cause)


def observe_failure(data: DataManager) -> Inference | None:
    """Return the symptom of a failed script, None if it ended well by itself."""
    end = data.get(ScriptEnd)
    if end is None or (end.well and not end.told_to_end):
        return None
    how = signal_text(end.signal) if end.signal else f"exit code {end.exit_code}"
    return Inference(
        name=SCRIPT_FAILED,
        description=f"{end.script or 'the script'} ended with {how}; the collected data does not"
        " show why",
        advice="look at the end of the job's output",
    )


def what_follows(cause: Diagnosed | None, job: JobAtFailure) -> DiagnosisAction:
    """Return the action of a job after a failure; `cause` is None without a conclusion."""
    data = DataManager([job] if cause is None else [job, cause])
    action = FailureDiagnostician().diagnose(data_manager=data)
    return StopJob(reason=f"nothing follows: {action.failed}") if action.failed else action


def planned(action: DiagnosisAction, *, restart: int, max_restarts: int) -> FailurePlanned:
    """Return the journal's record of an action, with the number of this restart and its limit."""
    at_fault = action.at_fault if isinstance(action, CheckNodes | LeaveNode) else ()
    return FailurePlanned(
        plan=action.kind,
        reason=action.reason,
        restart=restart,
        max_restarts=max_restarts,
        evidence=list(action.evidence),
        nodes=[verdict.node for verdict in at_fault],
    )


def _at_fault(data: DataManager) -> tuple[NodeVerdict, ...]:
    """Return the nodes at fault: those that Slurm lost, and those accused."""
    job, cause = data.get(JobAtFailure), data.get(Diagnosed)
    verdicts = {
        node: NodeVerdict(
            node=node,
            level=Level.FAULTY,
            reason="Slurm lost it while the job ran",
            evidence=(state,),
        )
        for node, state in (job.lost if job else ())
    }
    if cause is None:
        return tuple(verdicts.values())
    reason = cause.description
    if job and _is_known(cause, job.checked):
        # A node that a check judged healthy after the failure is not at fault for it.
        if cause.cause not in UNSEEN_BY_CHECKS:
            return tuple(verdicts.values())
        reason += "; a check has judged it healthy since the same failure, but cannot test for it"
    for node in cause.accused:
        verdict = NodeVerdict(
            node=node,
            level=Level.FAULTY,
            probability=_PROBABILITY[cause.sureness],
            reason=reason,
            evidence=tuple(cause.evidence) or ("the post-mortem",),
        )
        verdicts.setdefault(node, verdict)
    return tuple(verdicts.values())


def _alike(earlier: Diagnosed, later: Diagnosed) -> bool:
    """Return whether two failures have one cause in the same words, but for rank and address."""

    def words(cause: Diagnosed) -> str:
        first = cause.evidence[0] if cause.evidence else ""
        for node in cause.nodes:
            first = first.replace(node, "")
        return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", first)

    return earlier.cause == later.cause and words(earlier) == words(later)


def _is_known(cause: Diagnosed, earlier: Sequence[Diagnosed]) -> bool:
    return any(_alike(one, cause) for one in earlier)


def _after_hang(
    hang: TrainingEvent, job: JobAtFailure, evidence: tuple[str, ...]
) -> DiagnosisAction:
    """Check all nodes, and use those of the hang only as a last choice: it does not blame them.

    A hang without a place restarts once, others `_MOST_OF_A_KIND` times per kind.
    """
    what = hung_text(hang.description)
    if hang.is_of_script:
        reason = f"{what}; in the script's own code or data, the same again would hang again"
        return StopJob(reason=reason, evidence=evidence)

    def kind(of: TrainingEvent) -> str:
        return of.diagnosed.cause if of.located and of.diagnosed else ""

    most = _MOST_OF_A_KIND if hang.located else 1
    before = sum(kind(earlier) == kind(hang) for earlier in job.hangs_before)
    if before >= most:
        times = "once" if before == 1 else f"{before} times"
        reason = f"{what}; the script was already started again {times} after such a hang"
        return StopJob(reason=f"{reason} ({kind(hang) or 'without a place'})", evidence=evidence)
    there = tuple(hang.nodes) if hang.located else ()
    return CheckNodes(
        reason=what,
        nodes=(*job.nodes, *job.spares),
        evidence=evidence,
        last_choice=there if len(there) <= len(job.nodes) / 2 else (),
    )
