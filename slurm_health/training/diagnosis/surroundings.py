# SPDX-License-Identifier: Apache-2.0
"""What is known of the job beside its output: Slurm's word, the kernel's, the driver's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import KINDS, OUT_OF_MEMORY, XID, is_evidence
from slurm_health.node.rules.xid import judge_xid
from slurm_health.records.nodeset import is_down, is_lost
from slurm_health.records.script_records import (
    MOST_LINES,
    RANK_GONE,
    REQUEUED,
    advice_afterwards,
)
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.before_it_failed import hang_at_the_end, hung_until, line_of
from slurm_health.training.diagnosis.collected import (
    MonitorSaw,
    NodesTold,
    NodeTold,
    ScriptEnd,
    SlurmView,
    TrainingLog,
    leaving_out,
)
from slurm_health.training.diagnosis.samples import Standstill
from slurm_health.training.diagnosis.training_log import KILLED_FOR_MEMORY
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# What ends a job from outside, by Slurm's names of job states.
_OUTSIDE = {
    "CANCELLED": ("the job was cancelled", ""),
    "PREEMPTED": ("the job had to make way for another one", "it goes on when it is started again"),
    "REQUEUED": ("the job was requeued (scontrol requeue)", ""),
    "PENDING": ("the job was requeued", ""),
    "TIMEOUT": ("the job reached its time limit", "ask for more time (--time), or save more often"),
    "DEADLINE": ("the job reached its deadline", ""),
}
# slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***
_JOB_CANCELLED = re.compile(
    r"\*\*\* (?:JOB (\S+) ON \S+ CANCELLED AT"
    r"|STEP (\d[\d_+]*)\.\S+ ON \S+ CANCELLED AT \S+ DUE TO TIME)"
)
_DUE_TO = {
    "DUE TO TIME LIMIT": "TIMEOUT",
    "DUE TO PREEMPTION": "PREEMPTED",
    "DUE TO JOB REQUEUE": "REQUEUED",
}
_BACK_IN_THE_QUEUE = frozenset({"REQUEUED", "PENDING"})
_XID = re.compile(XID)
_RESET_REQUIRED = re.compile(
    "|".join(kind.pattern for kind in KINDS if kind.name == "gpu-reset-required")
)
_KILL = re.compile(OUT_OF_MEMORY)
_MEMORY_NOTE = re.compile(KILLED_FOR_MEMORY)
_LOST_NOTE = re.compile(r"Node failure on (?P<node>[\w.-]+)")
# slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO NODE FAILURE, SEE …
_FOR_A_NODE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE")
# slurmstepd: error: *** JOB 12 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-22T10:00:00 ***
_MEMORY_ERROR = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ ON (?P<node>[\w.-]+) UNCORRECTABLE MEMORY ERROR AT"
)


def ended_from_outside(_: Inference, data: DataManager) -> Inference | None:
    """Slurm, or the person that asked it to, ended the job: by the job's state, or the output."""
    view, log = data.get(SlurmView), data.get(TrainingLog)
    states = list(view.job_states) if view else []
    end = data.get(ScriptEnd)
    notes = _told_to_cancel(log.notes if log else (), end.job if end else "")
    for note in notes:
        states += [state for words, state in _DUE_TO.items() if words in note]
        if "DUE TO" not in note:
            states.append("CANCELLED")
    for state, (means, advice) in _OUTSIDE.items():
        if state in states:
            evidence = notes[-1:] or [f"Slurm: the job's state is {state}"]
            return _hung(state, means, evidence, data) or _ended(state, means, advice, evidence)
    return None


def _told_to_cancel(notes: Iterable[str], job: str) -> list[str]:
    """Return the lines that Slurm writes of a job that it ends: a script may print another's."""
    found = ((_JOB_CANCELLED.search(note), note) for note in notes)
    return [note for line, note in found if line and (not job or job in line.groups())]


def _ended(state: str, means: str, advice: str, evidence: Sequence[str]) -> Inference:
    return Inference(
        name=REQUEUED if state in _BACK_IN_THE_QUEUE else "ended-from-outside",
        description=means,
        attribution=Attribution.OUTSIDE,
        sureness=Sureness.CERTAIN,
        evidence=tuple(evidence),
        advice=advice,
    )


def _hung(state: str, means: str, evidence: Sequence[str], data: DataManager) -> Inference | None:
    """Return that it hung until it was ended, None where it did not.

    A hang that ran into the time limit, or that our monitor ended, is the cause; others who end
    a job may have other reasons.
    """
    saw, hang = data.get(MonitorSaw), hang_at_the_end(data)
    if saw is None or hang is None or hang.diagnosed is None or state in _BACK_IN_THE_QUEUE:
        return None
    told = (*evidence, line_of(hang))
    own = state == "CANCELLED" and saw.cancels
    if not own and state != "TIMEOUT":
        means = f"{means} while the training hung"
        advice = advice_afterwards(hang.diagnosed)
        return _ended(state, means, advice, (*told, hang.description))
    until = "slurm-health cancelled the job (--monitor=stop)" if own else means
    return hung_until(until, hang, told)


def lost_node(_: Inference, data: DataManager) -> Inference | None:
    """Slurm has lost a node of the job: it is down or does not answer.

    srun's word counts where Slurm is silent.
    """
    view, log = data.get(SlurmView), data.get(TrainingLog)
    lost = _named(_LOST_NOTE, data)
    for node, state in (view.node_states if view else {}).items():
        if is_lost(state):
            lost[node] = f"Slurm: {node} is {state}"
    if not lost:
        return _lost_without_a_name(log.notes if log else ())
    nodes = tuple(sorted(lost))
    return Inference(
        name="node-lost",
        description=f"Slurm lost {listed(nodes)} while the job ran",
        attribution=Attribution.NODE,
        sureness=_sureness_of_loss(lost, data),
        nodes=nodes,
        evidence=tuple(lost.values())[:MOST_LINES],
        advice=f"start again without {listed(nodes)} ({leaving_out(nodes, data)}) and tell"
        " your administrator",
    )


def _lost_without_a_name(notes: Sequence[str]) -> Inference | None:
    """Return that Slurm ended the job for a node, where its line is all that there is."""
    lines = [note for note in notes if _FOR_A_NODE.search(note)]
    if not lines:
        return None
    return Inference(
        name="node-lost",
        description="Slurm lost a node of the job, and does not say here which",
        attribution=Attribution.NODE,
        sureness=Sureness.LIKELY,
        evidence=tuple(lines[:MOST_LINES]),
        advice="start again: Slurm gives out no node that it has lost; `sinfo -R` and"
        " slurmctld's log say which it was",
    )


def broken_memory(_: Inference, data: DataManager) -> Inference | None:
    """Slurm tells the job that a node's memory met an error that it could not correct."""
    told = _named(_MEMORY_ERROR, data)
    if not told:
        return None
    nodes = tuple(sorted(told))
    return Inference(
        name="memory-broken",
        description=f"the memory of {listed(nodes)} had an error that it could not correct",
        attribution=Attribution.NODE,
        sureness=Sureness.LIKELY,
        nodes=nodes,
        evidence=tuple(told.values())[:MOST_LINES],
        advice=f"start again without {listed(nodes)} ({leaving_out(nodes, data)}) and tell"
        " your administrator",
    )


def _named(pattern: re.Pattern[str], data: DataManager) -> dict[str, str]:
    """Return the nodes of the job that such a line of Slurm's names, each with the last one."""
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    found = ((pattern.search(note), note) for note in (log.notes if log else ()))
    ours = end.nodes if end else ()
    return {match["node"]: note for match, note in found if match and match["node"] in ours}


def killed_for_memory(inference: Inference, data: DataManager) -> Inference | None:
    """The kernel ended processes because the job's memory was used up.

    By the kernel's count, or by lines of Slurm's. The kernel's own lines may be about any job of
    the node, and so count where its count could not be read. Of a rank that has gone while the
    others wait, where its own node tells of it.
    """
    log = data.get(TrainingLog)
    lines = [note for note in (log.notes if log else ()) if _MEMORY_NOTE.search(note)]
    nodes = {each.node for each in (log.failures if log else ()) if each.line in lines}
    for told in nodes_told(data):
        if inference.name == RANK_GONE and told.node not in inference.nodes:
            continue
        if "memory kills" in told.not_seen:
            lines += [text for text in told.kernel if _KILL.search(text)]
        if told.kills:
            limit = f", limit {told.limit_bytes / 1e9:.1f} GB" if told.limit_bytes else ""
            lines.insert(0, f"kernel: {told.kills} killed for memory on {told.node}{limit}")
            nodes.add(told.node)
    if not lines:
        return None
    return Inference(
        name="killed-for-memory",
        description="the memory that the job may use on a node was used up, and the kernel"
        " killed a process",
        attribution=Attribution.USER,
        sureness=Sureness.CERTAIN,
        nodes=tuple(sorted(nodes - {""})),
        ranks=inference.ranks,
        evidence=tuple(lines[:MOST_LINES]),
        advice="ask for more memory (--mem), or use less of it: fewer data loader workers,"
        " a smaller part of the data at a time",
    )


def gpu_errors(_: Inference, data: DataManager) -> Inference | None:
    """The driver of a node reports an error of a GPU that a program cannot cause.

    Xids are judged by NVIDIA's catalogue, as the checks of nodes do; then what NVML says now.
    """
    told = nodes_told(data)
    faults = {each.node: tuple(_node_faults(each.kernel)) for each in told}
    faults = {node: lines for node, lines in faults.items() if lines}
    if faults:
        first, lines = next(iter(faults.items()))
        bus, number, means = lines[0].bus, lines[0].number, lines[0].means
        said = f"GPU {bus} of {first} failed: Xid {number}, {means}"
        texts = {node: [each.text for each in lines] for node, lines in faults.items()}
        return _gpu_broken(said, texts, Sureness.CERTAIN, data)
    refused = {
        node.node: [line for line in node.kernel if _RESET_REQUIRED.search(line)] for node in told
    }
    refused = {node: lines for node, lines in refused.items() if lines}
    if refused:
        first = next(iter(refused))
        means = f"the driver of {first} refuses to use a GPU until it is reset"
        return _gpu_broken(means, refused, Sureness.LIKELY, data)
    lost = {each.node: each.lost_gpus for each in told if each.lost_gpus}
    if not lost:
        return None
    first, words = next(iter(lost.items()))
    # Likely: that it is so now may have come after what failed.
    texts = {node: [f"NVML: {each}" for each in words] for node, words in lost.items()}
    return _gpu_broken(f"{first}: {words[0]}", texts, Sureness.LIKELY, data)


def broken_hardware(_: Inference, data: DataManager) -> Inference | None:
    """The kernel of a node reports broken hardware; that it ended the script is possible only."""
    for told in nodes_told(data):
        for kind in KINDS:
            if kind.status is not Status.NODE_FAULT or kind.name == "gpu-reset-required":
                continue
            pattern = re.compile(kind.pattern)
            lines = [line for line in told.kernel if pattern.search(line) and is_evidence(line)]
            if lines:
                return Inference(
                    name=kind.name,
                    description=f"the kernel of {told.node} reports: {kind.what}",
                    attribution=Attribution.NODE,
                    sureness=Sureness.POSSIBLE,
                    nodes=(told.node,),
                    evidence=tuple(lines[:MOST_LINES]),
                    advice=f"tell your administrator: {kind.helps}",
                )
    return None


def nodes_told(data: DataManager) -> tuple[NodeTold, ...]:
    """Return what each node of the job told."""
    told = data.get(NodesTold)
    return told.nodes if told else ()


class _Xid(NamedTuple):
    bus: str
    number: str
    means: str
    text: str


def _node_faults(lines: Sequence[str]) -> Iterator[_Xid]:
    """Yield the Xids that no program causes."""
    for text in lines:
        match = _XID.search(text)
        if match:
            status, means = judge_xid(int(match["number"]), match["text"])
            if status is Status.NODE_FAULT:
                yield _Xid(match["bus"], match["number"], means.partition(";")[0], text)


def _gpu_broken(
    description: str, texts: Mapping[str, Sequence[str]], sureness: Sureness, data: DataManager
) -> Inference:
    nodes, log, stands = tuple(texts), data.get(TrainingLog), data.get(Standstill)
    failed = [each for each in (log.failures if log else ()) if each.node in nodes]
    # Those that only waited for the rank of this GPU may be on the same node.
    failed = [each for each in failed if not each.consequence] or failed
    ranks = {each.rank for each in failed}
    ranks |= {each.rank for each in (stands.ranks if stands else ()) if each.node in nodes}
    one = len(nodes) == 1
    lines = [line if one else f"{node}: {line}" for node, told in texts.items() for line in told]
    return Inference(
        name="gpu-broken",
        description=description,
        attribution=Attribution.NODE,
        sureness=sureness,
        nodes=nodes,
        ranks=tuple(sorted(rank for rank in ranks if rank is not None)),
        evidence=tuple(lines[:MOST_LINES]),
        advice=f"leave out {listed(nodes)} ({leaving_out(nodes, data)}) and tell"
        " your administrator",
    )


def _sureness_of_loss(lost: Mapping[str, str], data: DataManager) -> Sureness:
    """A node that is down ended the job; one that only does not answer need not have.

    Where all of several nodes are gone, the trouble is more likely Slurm's or the network's.
    """
    end, log, view = data.get(ScriptEnd), data.get(TrainingLog), data.get(SlurmView)
    if end and len(lost) == len(end.nodes) > 1:
        return Sureness.POSSIBLE
    states = view.node_states if view else {}
    if any(_LOST_NOTE.search(said) or is_down(states.get(n, "")) for n, said in lost.items()):
        return Sureness.CERTAIN
    return Sureness.POSSIBLE if log and log.of_their_own else Sureness.LIKELY
