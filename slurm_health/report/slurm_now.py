# SPDX-License-Identifier: Apache-2.0
"""Slurm's word on a job: why it has no journal, whether it waits again, who ended it, its nodes.

The journal ends with the job, and an epilog drains after it: only Slurm's notes on nodes show that.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Mapping
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
_TIMEOUT_S = 3.0
_RECENT_S = 7 * 86400.0  # the nodes of an older job have other jobs today
_MOST_TASKS = 20  # of which Slurm is asked, a call for every one
_OWNER = re.compile(r"(\S+)\((\d{1,10})\)", re.ASCII)
# In every script that slurm-health submits.
_OURS = "-m slurm_health supervise"
# The command, outside comments, by which a script submitted with plain sbatch checks its nodes.
_OWN_CHECK = re.compile(
    r"^[^#\n]*\bslurm[-_]health[\"']?(?:[ \t]+-\S+)*[ \t]+"
    r"(?:check\b|run\b(?:[^\n]*\\\n)*[^\n]*--(?:network-check|straggler-detection|check)\b)",
    re.MULTILINE,
)
# Slurm's reasons for a wait that only a change of the job, or of the cluster, can end.
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
    """Slurm's word on a job without a journal; `final`: it will never have one.

    `text` is empty if Slurm cannot be asked. `waits`: it is pending or starting, and all is well.
    """

    text: str
    final: bool = False
    waits: bool = False


def reason(job: JobId, environ: Mapping[str, str]) -> str:
    """Return why a job has no journal, empty if Slurm cannot be asked."""
    return word(job, environ).text


def word(job: JobId, environ: Mapping[str, str]) -> Word:
    """Ask Slurm about a job without a journal, and whether it is to have one."""
    client = Client(environ, patience_s=0)
    try:
        known = client.job(job)
    except UnknownJob:
        return Word(f"Slurm does not know job {job}, or no longer does.", final=True)
    except SlurmError:
        return Word("")
    script = comment = ""
    with contextlib.suppress(SlurmError):
        comment = client.comment(job)
    with contextlib.suppress(SlurmError):  # another user's, an interactive job's
        script = client.batch_script(job)
    text = explain(known, script, comment, uid=os.geteuid())
    waits = not known.ended and text.startswith((_WAITS, _STARTS))
    return Word(text, final=known.ended, waits=waits)


def may_know(missing: RunNotFound, cluster: str | None, environ: Mapping[str, str]) -> bool:
    """Return whether Slurm here may know a job without a journal: not one of another cluster."""
    if not missing.clusters:
        return True
    with contextlib.suppress(SlurmError):
        return Client(environ, patience_s=0).cluster_name() == cluster
    return False


def of_tasks(
    array: str, missing: Collection[int] | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what Slurm knows of an array's tasks that have no journal, by their names.

    `missing` are the tasks in question; None stands for those that are pending.
    """
    if missing is None:
        client = Client(environ, patience_s=0)
        try:
            job = client.job(array)
        except SlurmError:
            return {}
        left = job.value("ArrayTaskId")
        return {f"{array}_[{left}]": explain(job, "")} if job.pending and left else {}
    by_reason: dict[str, list[list[int]]] = {}  # ranges of tasks: first, last
    for asked, number in enumerate(sorted(missing)):
        skipped = asked >= _MOST_TASKS or "" in by_reason  # Slurm does not answer
        why = "" if skipped else reason(f"{array}_{number}", environ)
        ranges = by_reason.setdefault(why, [])
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return {
        f"{array}_[{','.join('-'.join(map(str, part)) for part in ranges)}]": why or UNKNOWN
        for why, ranges in by_reason.items()
    }


def explain(job: Job, script: str, comment: str = "", *, uid: int | None = None) -> str:
    """Return why a job that Slurm knows has no journal here.

    `script` is empty if it may not be read; `uid` is the user who asks.
    """
    state = "+".join(sorted(job.states)).lower()
    owner = _OWNER.fullmatch(job.value("UserId"))  # some ways to ask Slurm leave it out
    if owner and uid not in {None, 0, int(owner[2])}:  # root may read any
        name = owner[1]
        return (
            f"it is {name}'s job ({state}), and only {name} may read its journal: ask {name}, or an"
            f" administrator, for `slurm-health report {job.job_id}`."
        )
    why_unchecked = unchecked.said_in(comment)
    if why_unchecked:
        return f"its comment in Slurm says ({state}): {why_unchecked}"
    if script and _OURS not in script and not _OWN_CHECK.search(script):
        return f"it was not submitted with slurm-health sbatch, so nothing was checked ({state})."
    if job.reason == LAUNCH_FAILED:
        return f"{LAUNCH_FAILED_TEXT}: {LAUNCH_FAILED_ADVICE}."
    if job.pending:
        why = _CANNOT_START.get(job.reason)
        begins = "its nodes are checked when it starts."
        if why is not None:
            begins = (
                f"it cannot start as it was submitted: {why}. Correct that and submit it again;"
            )
            begins += f" scancel {job.job_id} removes this one."
        return f"{_WAITS}{_why_pending(job)}: {begins}"
    output = job.value("StdOut") if job.nodes else ""  # without nodes it has never started
    if not job.ended:
        return f"{_not_ended(job, state, output)}."
    killed = _killed(job)
    see = f" Its output, {output}, says why." if output and not killed else ""
    return f"it ended before a check began ({', '.join(filter(None, (state, killed)))}).{see}"


def _not_ended(job: Job, state: str, output: str) -> str:
    """Return the state of a job that is neither pending nor over, and has no journal."""
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


def _why_pending(job: Job) -> str:
    return f" ({job.reason})" if job.reason not in {"", "None"} else ""


def asked(
    story: Story, *, now_s: float, environ: Mapping[str, str], patience_s: float = _TIMEOUT_S
) -> Story:
    """Return a story with Slurm's word on its job and nodes now, unchanged if Slurm is silent.

    A kill of the batch script, or the end of its node, also ends the process that would record it;
    a job that its check put back into the queue may be cancelled there. Slurm is asked about a
    recent job, and about one whose end is not recorded.
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
            text = f"Slurm says that the job has ended ({how})"
            story = with_end(story, last_word.of_states(job.states) if killed else text)
        elif not (job.ended or runs):
            held, queued = job.states & _HELD, job.states & {*_REQUEUING, "PENDING"}
            waits = "held" if held else "pending again" if queued else ""
            waits = waits or ("about to start again" if "CONFIGURING" in job.states else "")
            story = replace(story, waits=f"{waits}{_why_pending(job)}" if waits else "")
        outside = run.post_mortem and run.post_mortem.attribution == Attribution.OUTSIDE
        if job.ended and (outside or explained or story.ended or last.state is State.STOPPED):
            uid = client.cancelled_by(story.job)
            story = replace(story, cancelled_by="" if uid is None else user_name(uid))
        return _with_nodes(story, client) if recent else story
    except (SlurmError, ValueError):  # names that no node list can hold
        return story


def with_end(story: Story, how: str) -> Story:
    """Return the story of a job that has ended, and with it a check that had not."""
    last = story.last
    if last.state is State.RUNNING:
        begun = [measured.name for measured in last.rounds]
        note = unfinished_text(None, gone=True, judged=last.judged, rounds=begun)
        last = replace(last, state=State.STOPPED, note=note)
    return replace(story, runs=(*story.runs[:-1], last), ended=how)


def _killed(job: Job) -> str:
    """Return which signal ended the batch script, empty if none did."""
    number = job.value("ExitCode").partition(":")[2]
    killed = number.isdecimal() and int(number)
    return f"killed by {signal_name(int(number))}" if killed else ""


def _with_nodes(story: Story, client: Client) -> Story:
    """Return a story with the nodes of its job that Slurm keeps out of use now."""
    nodes = client.nodes([node.node for node in story.nodes]) if story.nodes else {}
    return replace(
        story,
        out_of_use=tuple(
            NodeNow(node=node.name, state=node.state.lower(), reason=node.reason)
            for node in nodes.values()
            if node.out_of_pool
        ),
    )
