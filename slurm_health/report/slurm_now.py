# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of a job now: why it has no journal, if it waits again, who ended it, its nodes.

The journal ends with the job, and an epilog drains after it: only Slurm's notes on the nodes tell.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from slurm_health.preflight.decide import unchecked
from slurm_health.records.errors import RunNotFound, SlurmError, UnknownJob
from slurm_health.records.script_records import (
    LAUNCH_FAILED,
    LAUNCH_FAILED_ADVICE,
    LAUNCH_FAILED_TEXT,
    Attribution,
)
from slurm_health.report.find import user_name
from slurm_health.report.sentences import unfinished_text
from slurm_health.report.story import NodeNow, State, Story
from slurm_health.system.signals import signal_name
from slurm_health.system.slurm import last_word
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job, JobId

UNKNOWN = "no journal"
_WAITS, _STARTS = "it is pending", "it is starting"
_OF_ENDED_JOBS = frozenset({signal.SIGTERM, signal.SIGKILL})
_PATIENCE_S = 3.0
_RECENT_S = 7 * 86400.0  # what the nodes of an older job do today is of no use
_ASKED = 20  # tasks of which Slurm is asked, a call each
_OWNER = re.compile(r"(\S+)\((\d{1,10})\)", re.ASCII)
# In every script that slurm-health submits.
_OURS = "-m slurm_health supervise"
# What a script that was submitted with plain sbatch checks its nodes with, outside comments.
_OWN_CHECK = re.compile(
    r"^[^#\n]*\bslurm[-_]health[\"']?(?:[ \t]+-\S+)*[ \t]+"
    r"(?:check\b|run\b(?:[^\n]*\\\n)*[^\n]*--(?:network-check|straggler-detection|check)\b)",
    re.MULTILINE,
)
# Slurm's words for what only a change of the job, or of the cluster, brings to an end.
_CANNOT_START = {
    "PartitionConfig": "its partition does not have the nodes that it asks for (--nodes,"
    " --partition; sinfo shows what there is)",
    "PartitionNodeLimit": "its partition lets no job have as many nodes as it asks for (--nodes)",
    "PartitionTimeLimit": "its partition lets no job run for so long (--time)",
    "BadConstraints": "no nodes have what it asks for (--constraint, --mem, --gres, --nodelist and"
    " --exclude together)",
    "DependencyNeverSatisfied": "the job that it depends on has not ended as it requires"
    " (--dependency)",
    "InvalidAccount": "its account is not valid (--account)",
    "InvalidQOS": "its quality of service is not valid (--qos)",
}
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
_HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_REQUEUING = frozenset({"REQUEUED", "REQUEUE_FED"})
_ENDING = frozenset({"COMPLETING", "STAGE_OUT"})


class Word(NamedTuple):
    """What Slurm says of a job without a journal, and whether it will never have one.

    `text` is empty where Slurm cannot be asked. `waits`: it is pending or starting, and
    nothing is wrong.
    """

    text: str
    final: bool = False
    waits: bool = False


def reason(job: JobId, environ: Mapping[str, str]) -> str:
    """Ask Slurm about a job without a journal; say nothing where Slurm cannot be asked."""
    return word(job, environ).text


def word(job: JobId, environ: Mapping[str, str]) -> Word:
    """Ask Slurm about a job without a journal, and whether it is to have one."""
    client = Client(environ, patience_s=0)
    try:
        found = client.job(job)
    except UnknownJob:
        return Word(f"Slurm does not know job {job}, or no longer does.", final=True)
    except SlurmError:
        return Word("")
    script = comment = ""
    with contextlib.suppress(SlurmError):
        comment = client.comment(job)
    with contextlib.suppress(SlurmError):  # another user's, an interactive job's
        script = client.batch_script(job)
    told = explain(found, script, comment, uid=os.geteuid())
    waits = not found.ended and told.startswith((_WAITS, _STARTS))
    return Word(told, final=found.ended, waits=waits)


def may_know(missing: RunNotFound, cluster: str | None, environ: Mapping[str, str]) -> bool:
    """Tell whether Slurm here may know a job without a journal: not that of another cluster."""
    if not missing.clusters:
        return True
    with contextlib.suppress(SlurmError):
        return Client(environ, patience_s=0).cluster_name() == cluster
    return False


def of_tasks(
    array: str, missing: Collection[int] | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what Slurm knows of an array's tasks that have no journal, by their names.

    `missing` are the tasks that were asked for; where it is None, those that are pending are told.
    """
    if missing is None:
        client = Client(environ, patience_s=0)
        try:
            job = client.job(array)
        except SlurmError:
            return {}
        left = job.value("ArrayTaskId")
        return {f"{array}_[{left}]": explain(job, "")} if job.pending and left else {}
    numbers = sorted(missing)
    by_reason: dict[str, list[int]] = {}
    for asked, number in enumerate(numbers):
        silent = asked >= _ASKED or "" in by_reason  # where Slurm does not answer, it is left alone
        why = "" if silent else reason(f"{array}_{number}", environ)
        by_reason.setdefault(why, []).append(number)
    return {f"{array}_[{_folded(same)}]": why or UNKNOWN for why, same in by_reason.items()}


def _folded(numbers: Sequence[int]) -> str:
    """Return `1-3,7` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def explain(job: Job, script: str, comment: str = "", *, uid: int | None = None) -> str:
    """Say why a job that Slurm knows has no journal here.

    `script` is empty where it may not be seen; `uid` is who asks.
    """
    state = "+".join(sorted(job.states)).lower()
    owner = _OWNER.fullmatch(job.value("UserId"))  # not told by every way to ask Slurm
    if owner and uid not in {None, 0, int(owner[2])}:  # root may read any
        name = owner[1]
        return (
            f"it is {name}'s job ({state}), and only {name} may read its journal: ask {name}, or an"
            f" administrator, for `slurm-health report {job.job_id}`."
        )
    said = unchecked.said_in(comment)
    if said:
        return f"its comment in Slurm says ({state}): {said}"
    if script and _OURS not in script and not _OWN_CHECK.search(script):
        return f"it was not submitted with slurm-health sbatch, so nothing was checked ({state})."
    if job.reason == LAUNCH_FAILED:
        return f"{LAUNCH_FAILED_TEXT}: {LAUNCH_FAILED_ADVICE}."
    if job.pending:
        return f"{_WAITS}{_why_pending(job)}: {_until_it_starts(job)}"
    output = job.value("StdOut") if job.nodes else ""  # it has never started
    if not job.ended:
        return f"{_not_ended(job, state, output)}."
    killed = _killed(job)
    see = f" Its output, {output}, says why." if output and not killed else ""
    return f"it ended before a check began ({', '.join(filter(None, (state, killed)))}).{see}"


def _not_ended(job: Job, state: str, output: str) -> str:
    """Say how it stands with a job that is neither pending nor over, and has no journal."""
    see = f"; if it cannot, the job's output says why: {output}" if output else ""
    if job.states == {"RUNNING"}:
        return f"it is running, and its check has not begun yet{see}"
    if "CONFIGURING" in job.states:
        return f"{_STARTS} ({state}): its nodes are checked once they are ready"
    if job.states & _SUSPENDED:
        return "it is suspended, and its check begins no sooner than it goes on"
    if job.states & _HELD:
        return f"it is held ({state}), and starts no sooner than scontrol release {job.job_id}"
    if job.states & _REQUEUING:
        return f"it was requeued ({state}): its nodes are checked when it starts again"
    if job.states & _ENDING:
        see = f": its output, {output}, says why" if output else ""
        return f"it is ending ({state}), and its check has not begun{see}"
    return f"Slurm says that it is {state}, and its check has not begun yet{see}"


def _until_it_starts(job: Job) -> str:
    """Say that nodes are checked when it starts; why not, where it cannot as it was submitted."""
    why = _CANNOT_START.get(job.reason)
    if why is None:
        return "its nodes are checked when it starts."
    return (
        f"it cannot start as it was submitted: {why}."
        f" Correct that and submit it again; scancel {job.job_id} removes this one."
    )


def _why_pending(job: Job) -> str:
    return f" ({job.reason})" if job.reason not in {"", "None"} else ""


def asked(
    story: Story, *, now_s: float, environ: Mapping[str, str], patience_s: float = _PATIENCE_S
) -> Story:
    """Return a story with Slurm's word on its job and nodes now, as it is if Slurm is silent.

    Whoever kills the batch script, or its node, ends what would have recorded that; a job that its
    check put back into the queue may be cancelled there. Slurm is asked about a recent job, and
    about one whose end nothing recorded.
    """
    last, run = story.last, story.training
    script = run.script
    killed = script is not None and script.signal in _OF_ENDED_JOBS
    runs = run.script_runs or last.state is State.RUNNING
    explained = bool(last.requeued) or run.post_mortem is not None
    open_end = not explained and (runs or killed or last.disposition == "requeue")
    began_s = last.started_s
    recent = began_s is not None and 0 <= now_s - began_s < _RECENT_S
    if began_s is None or not (recent or open_end):
        return story
    client = Client(environ, patience_s=0, deadline_s=patience_s)
    try:
        if client.cluster_name() != story.cluster:
            return story
        try:
            job = client.job(story.job)
        except UnknownJob:
            if open_end and not killed:
                story = with_end(story, "the job has ended: Slurm no longer knows it")
            return _with_nodes(story, client) if recent else story
        state = "+".join(sorted(job.states)).lower()
        story = replace(story, slurm_state=state, over_in_slurm=job.ended)
        if job.ended and open_end:
            how = ", ".join(filter(None, (state, _killed(job))))
            said = f"Slurm says that the job has ended ({how})"
            story = with_end(story, last_word.of_states(job.states) if killed else said)
        elif not (job.ended or runs) and (how := _how_it_waits(job.states)):
            story = replace(story, waits=f"{how}{_why_pending(job)}")
        outside = run.post_mortem and run.post_mortem.attribution == Attribution.OUTSIDE
        if job.ended and (outside or explained or story.ended or last.state is State.STOPPED):
            uid = client.cancelled_by(story.job)
            story = replace(story, cancelled_by="" if uid is None else user_name(uid))
        return _with_nodes(story, client) if recent else story
    except (SlurmError, ValueError):  # names that no node list can hold
        return story


def _how_it_waits(states: Collection[str]) -> str:
    """Return how a job waits for its next attempt, empty if it does not."""
    if _HELD.intersection(states):
        return "held"
    if _REQUEUING.union({"PENDING"}).intersection(states):
        return "pending again"
    return "about to start again" if "CONFIGURING" in states else ""


def with_end(story: Story, how: str) -> Story:
    """Return the story of a job that has ended, and with it a check that had not."""
    last = story.last
    if last.state is State.RUNNING:
        begun = [each.round for each in last.rounds]
        note = unfinished_text(None, gone=True, judged=last.judged, rounds=begun)
        last = replace(last, state=State.STOPPED, note=note)
    return replace(story, runs=(*story.runs[:-1], last), ended=how)


def _killed(job: Job) -> str:
    """Return which signal ended the batch script, empty if none did."""
    number = job.value("ExitCode").partition(":")[2]
    killed = number.isdecimal() and int(number)
    return f"killed by {signal_name(int(number))}" if killed else ""


def _with_nodes(story: Story, client: Client) -> Story:
    """Return a story with the nodes of its job that Slurm has out of use now."""
    found = client.nodes([node.node for node in story.nodes]) if story.nodes else {}
    out = [node for node in found.values() if node.out_of_pool]
    return replace(
        story,
        out_of_use=tuple(
            NodeNow(node=node.name, state=node.state.lower(), reason=node.reason) for node in out
        ),
    )
