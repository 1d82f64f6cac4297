# SPDX-License-Identifier: Apache-2.0
"""What must never be, whatever happens to a job. Pure."""

from collections.abc import Iterator

from slurm_health.node.rules import drain_note
from slurm_health.records.verdict import Level

from .look import Check, Seen, Start
from .plan import ENDINGS, FAULTS, SLOW, Deed, Plan

# What makes Slurm itself start a job again, or end it.
_SLURMS_OWN = {Deed.KILL_SLURMCTLD, Deed.KILL_SLURMD, Deed.LOSE_NODE}
# What takes something from a node that its check or its script needs there.
_TAKES_AWAY = {*_SLURMS_OWN, Deed.KILL_AGENT, Deed.KILL_WORKER, Deed.KILL_SRUN, Deed.KILL_RANK}
_UNCHECKED = "UNCHECKED"
_EXPLAINED = (
    "the job stops:",
    "ended the check, so the script did not run",
    "during its check, so the script did not run",
    "submit it again",
    "is not started again:",
)
_OURS = "slurm-health:"
# As slurmstepd says it, whatever the job is ended for; and for a requeue, which may be ours.
_ENDED, _REQUEUED = "CANCELLED AT", "DUE TO JOB REQUEUE"
_NO_STEP = "Job/step already completing or completed"


def violations(plan: Plan, seen: Seen) -> list[str]:
    """Return what went wrong in a run; nothing if all is as it must be."""
    found = [
        *_drains(plan, seen),
        *_accusations(plan, seen),
        *_journals(seen),
        *_starts(plan, seen),
        *_ending(plan, seen),
        *(f"left running: {each}" for each in seen.left),
    ]
    if "Traceback" in seen.output:
        found.append("the job's output has a traceback")
    return found


def _hit(seen: Seen) -> set[str]:
    """Return the nodes that Slurm could not reach: what is said of them meanwhile is true."""
    return {each.node for each in seen.done if each.deed in {Deed.KILL_SLURMD, Deed.LOSE_NODE}}


def _drains(plan: Plan, seen: Seen) -> Iterator[str]:
    bad = plan.hidden | plan.flagged
    if plan.user == "root":
        lost = {each.node for each in seen.done if each.deed is Deed.LOSE_NODE}
        bad |= {*plan.played, *lost}
    for node, reason in seen.drained.items():
        ours = drain_note.is_ours(reason)
        if node not in bad and (ours or node not in _hit(seen) | {*seen.lost_prologs}):
            yield f"{node} is well and was drained: {reason}"


def _accusations(plan: Plan, seen: Seen) -> Iterator[str]:
    may_be = {Level.FAULTY: FAULTS | {"stuck"}, Level.SLOW: {SLOW}}
    for check in seen.checks:
        for node, level in check.levels.items():
            how = plan.played.get(node, "well")
            if level in may_be and how not in may_be[level] and node not in _hit(seen):
                yield f"attempt {check.attempt}: {node} is {how} and was found {level.value}"
    # What a check loses because its job is ended is held against no node.
    if not {each.deed for each in seen.done} & _TAKES_AWAY:
        for node, standing in seen.accused.items():
            if node not in plan.played.keys() | plan.flagged:
                yield f"{node} is well, and history calls it {standing}"


def _journals(seen: Seen) -> Iterator[str]:
    for check in seen.checks:
        if check.problem:
            yield f"the journal of attempt {check.attempt}: {check.problem}"
        for node in check.drained_twice:
            yield f"attempt {check.attempt}: {node} was drained twice"
    if seen.report_problem:
        yield seen.report_problem


# --- the script -----------------------------------------------------------------------------------


def _starts(plan: Plan, seen: Seen) -> Iterator[str]:
    starts = [(start.attempt, start.restart) for start in seen.starts]
    attempts = sorted({attempt for attempt, _ in starts})
    deeds = {each.deed for each in seen.done}
    if len({*starts}) < len(starts):
        yield f"the script ran more than once in one start of it: {starts}"
    elif any(restart > plan.restarts for _, restart in starts):
        yield f"the script was started again more often than {plan.restarts} times: {starts}"
    elif (
        not deeds & {*_SLURMS_OWN, Deed.REQUEUE, Deed.PREEMPT}
        and not (plan.restarts and all(_left_by_its_check(each, seen) for each in attempts[:-1]))
        and len(attempts) > 1
    ):
        yield f"nobody asked for it, and the script ran again: attempts {attempts}"
    for start in seen.starts:
        if start.beside and not _of_lost_batch_node(start, seen):
            yield f"start {start.restart} of attempt {start.attempt} ran beside another: {start}"
        check = _check_before(start, seen)
        if check is None or check.finished is None or not check.levels:
            if _UNCHECKED not in seen.output:
                yield f"attempt {start.attempt} ran on unchecked nodes, and nothing says so"
            continue
        yield from _place(plan, start, check)
        undisturbed = (
            start is seen.starts[-1]
            and start.ended
            and not deeds & {*_SLURMS_OWN, *ENDINGS, Deed.KILL_SUPERVISOR}  # any may end the job
            and not _ended_by_a_prolog(plan, seen)
        )
        if undisturbed and sorted(start.tasks) != sorted(start.nodes):
            yield f"the script had {start.nodes}, and its tasks ran on {start.tasks}"


def _left_by_its_check(attempt: int, seen: Seen) -> bool:
    """Tell whether an attempt in which the script ran was left by the check before a restart."""
    checks = [each.finished for each in seen.checks if each.attempt == attempt]
    return any(finished is not None and finished.leaves for finished in checks)


def _of_lost_batch_node(start: Start, seen: Seen) -> bool:
    """Tell whether only a batch script that nobody could end still ran: its node was lost."""
    lost = {each.node for each in seen.done if each.deed is Deed.LOSE_NODE}
    earlier = {each.nodes[0] for each in seen.starts if each.attempt < start.attempt and each.nodes}
    return start.beside == ("batch",) and bool(lost & earlier)


def _check_before(start: Start, seen: Seen) -> Check | None:
    """Return the check of the attempt, the latest one where the script was started again.

    It is one that came to its end, if there is one: a check whose master is killed begins again
    in a directory of its own, what follows a failure may have been cut short, and a job that Slurm
    forgot comes back with the same attempt.
    """
    checks = [each for each in seen.checks if each.attempt == start.attempt]
    checks = [each for each in checks if each.finished] or checks
    again = any(each.restart for each in seen.starts if each.attempt == start.attempt)
    return next(iter(checks if again and not start.restart else checks[::-1]), None)


def _place(plan: Plan, start: Start, check: Check) -> Iterator[str]:
    """Judge where a script ran after a check with a verdict."""
    where = f"attempt {start.attempt} ran on {','.join(start.nodes)}"
    reason = check.finished.reason if check.finished else ""
    if len(start.nodes) != start.count:
        yield f"{where}, and SLURM_NNODES is {start.count}"
    if not plan.least <= len(start.nodes) <= plan.nodes and "could not" not in reason:
        yield f"{where}; {plan.least} to {plan.nodes} nodes were asked for"
    for node in start.nodes:
        level, how = check.levels.get(node), plan.played.get(node)
        if how in FAULTS and level is Level.HEALTHY:
            yield f"{where}; {node} {how} and was found healthy"
        if level is Level.FAULTY and not reason:
            yield f"{where}; {node} was found faulty, and nothing says why it was used"


# --- the end of the job ---------------------------------------------------------------------------


def _ending(plan: Plan, seen: Seen) -> Iterator[str]:
    state = seen.job.get("JobState", "")
    said = f"{state} {seen.job.get('Reason', '')} {seen.job.get('ExitCode', '')}"
    if seen.unsettled:
        yield f"the job does not settle: {seen.unsettled}"
    elif state == "COMPLETED":
        if not any(start.ended for start in seen.starts):
            yield "the job completed, and its script did not run to its end"
    elif not _explained(plan, seen):
        yield f"nothing explains why the job is {said}"


def _explained(plan: Plan, seen: Seen) -> bool:
    deeds = {each.deed for each in seen.done}
    prolog_failed = _ended_by_a_prolog(plan, seen)
    match seen.job.get("JobState", ""):
        case "CANCELLED":
            return Deed.CANCEL in deeds or prolog_failed
        case "TIMEOUT":
            return Deed.TIME_LIMIT in deeds
        case "PREEMPTED":
            return Deed.PREEMPT in deeds
        case "FAILED":
            killed = Deed.KILL_SUPERVISOR in deeds and seen.job.get("ExitCode") == "0:9"
            never_began = prolog_failed and not seen.output
            # A slurmctld that had not yet saved why it ended its job takes that for a failure.
            word = _ENDED if deeds & {*ENDINGS} else _REQUEUED
            forgotten = Deed.KILL_SLURMCTLD in deeds and word in seen.output
            # Of a job whose time is up, or its grace before it makes way, Slurm starts no step any
            # more, and it looks for such jobs every 30 s.
            over = Deed.TIME_LIMIT in deeds or (Deed.PREEMPT in deeds and plan.grace_s > 0)
            too_late = over and _NO_STEP in seen.output
            said = any(words in seen.output for words in _EXPLAINED)
            return killed or never_began or forgotten or too_late or said
        case "PENDING":
            ours = seen.job.get("Comment", "").startswith(_OURS)
            users = bool(deeds & {Deed.HOLD, Deed.REQUEUE})
            return ours or users or bool(deeds & _SLURMS_OWN) or _too_few(plan, seen)
        case _:
            return bool(deeds & _SLURMS_OWN)


def _ended_by_a_prolog(plan: Plan, seen: Seen) -> bool:
    # A job that it may not requeue after a failed prolog Slurm ends, and its node's note says why.
    # The batch host may have started the script by then: it runs on, and can start no task.
    return "--no-requeue" in plan.options and bool(plan.flagged & {*seen.drained})


def _too_few(plan: Plan, seen: Seen) -> bool:
    """Tell whether the job waits because too many nodes are out of use."""
    return bool(seen.drained) and seen.job.get("Reason", "").startswith(
        ("Resources", "ReqNodeNotAvail", "BadConstraints", "Nodes_required")
    )
