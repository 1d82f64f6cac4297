# SPDX-License-Identifier: Apache-2.0
"""What is known of the job beside its output: Slurm's word, the kernel's, the driver's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import OUT_OF_MEMORY, XID
from slurm_health.node.rules.xid import judge_xid
from slurm_health.records.script_records import (
    HUNG,
    MOST_LINES,
    REQUEUED,
    SCRIPT_FAILED,
    advice_afterwards,
)
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.before_it_failed import hang_at_the_end, line_of
from slurm_health.training.diagnosis.collected import (
    Collected,
    KernelMessages,
    MemoryEvents,
    MonitorSaw,
    ScriptEnd,
    SlurmView,
    TrainingLog,
)
from slurm_health.training.diagnosis.inference import Attribution, Inference, Sureness

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
_JOB_CANCELLED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT")
_DUE_TO = {
    "DUE TO TIME LIMIT": "TIMEOUT",
    "DUE TO PREEMPTION": "PREEMPTED",
    "DUE TO JOB REQUEUE": "REQUEUED",
}
_BACK_IN_THE_QUEUE = frozenset({"REQUEUED", "PENDING"})
_XID = re.compile(XID)
_KILL = re.compile(OUT_OF_MEMORY)
_MEMORY_NOTE = re.compile(r"oom[_-]kill|Out Of Memory|out of memory|Exceeded job memory", re.I)
_LOST_NOTE = re.compile(r"Node failure on (?P<node>[\w.-]+)")
_LOST_STATES = ("DOWN", "FAIL")


class EndedFromOutside:
    """Slurm, or the person that asked it to, ended the job."""

    name = "slurm-ended-it"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """Slurm's word is needed, or its line in the output."""
        has_data = data.get(SlurmView) is not None or data.get(TrainingLog) is not None
        return inference.name == SCRIPT_FAILED and has_data

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Name the state that Slurm has given to the job."""
        view, log = data.get(SlurmView), data.get(TrainingLog)
        states = list(view.job_states) if view else []
        notes = [note for note in (log.notes if log else ()) if _JOB_CANCELLED.search(note)]
        for note in notes:
            states += [state for words, state in _DUE_TO.items() if words in note]
            if "DUE TO" not in note:
                states.append("CANCELLED")
        for state, (means, advice) in _OUTSIDE.items():
            if state in states:
                evidence = notes[-1:] or [f"Slurm: the job's state is {state}"]
                return [
                    _hung(state, means, evidence, data) or _ended(state, means, advice, evidence)
                ]
        return ()


def _ended(state: str, means: str, advice: str, evidence: Sequence[str]) -> Inference:
    return Inference(
        name=REQUEUED if state in _BACK_IN_THE_QUEUE else "ended-from-outside",
        description=means,
        attribution=Attribution.OUTSIDE,
        sureness=Sureness.CERTAIN,
        evidence=tuple(evidence),
        advice=advice,
    )


def _hung(state: str, means: str, evidence: Sequence[str], data: Collected) -> Inference | None:
    """Return that it hung until it was ended, None where it did not.

    A hang that ran into the time limit, or that our monitor ended, is the cause; whoever else ends
    a job may have other reasons.
    """
    saw, hang = data.get(MonitorSaw), hang_at_the_end(data)
    if saw is None or hang is None or state in _BACK_IN_THE_QUEUE:
        return None
    found = hang.found
    told = (*evidence, line_of(hang), found.description)
    advice = advice_afterwards(found)
    own = state == "CANCELLED" and saw.cancels
    if not own and state != "TIMEOUT":
        means = f"{means} while the training hung"
        return _ended(state, means, advice, told)
    until = "slurm-health cancelled the job (--monitor=stop)" if own else means
    sure = Sureness[found.sureness.upper()] >= Sureness.LIKELY
    return Inference(
        name=HUNG,
        description=f"the training hung until {until}: {found.description}",
        attribution=Attribution(found.attribution) if sure else Attribution.UNDECIDED,
        sureness=Sureness.CERTAIN,
        nodes=tuple(found.nodes) if sure else (),
        ranks=tuple(found.ranks),
        evidence=told,
        advice=advice,
    )


class LostNode:
    """Slurm has lost a node of the job."""

    name = "slurm-lost-a-node"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """What Slurm says of nodes is needed, here or in the output."""
        has_data = data.get(SlurmView) is not None or data.get(TrainingLog) is not None
        return inference.name == SCRIPT_FAILED and has_data

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Name nodes that are down or do not answer; srun's word counts where Slurm is silent."""
        view, log, end = data.get(SlurmView), data.get(TrainingLog), data.get(ScriptEnd)
        ours = set(end.nodes) if end else set()
        lost: dict[str, str] = {}
        for note in log.notes if log else ():
            if (match := _LOST_NOTE.search(note)) and match["node"] in ours:
                lost[match["node"]] = note
        for node, state in (view.node_states if view else {}).items():
            # `*`: slurmctld gets no answer from it.
            if state.endswith("*") or any(word in state for word in _LOST_STATES):
                lost[node] = f"Slurm: {node} is {state}"
        if not lost:
            return ()
        nodes = tuple(sorted(lost))
        return [
            Inference(
                name="node-lost",
                description=f"Slurm lost {listed(nodes)} while the job ran",
                attribution=Attribution.NODE,
                sureness=_sureness_of_loss(lost, data),
                nodes=nodes,
                evidence=tuple(lost.values())[:MOST_LINES],
                advice=f"start again without {listed(nodes)} (sbatch --exclude={','.join(nodes)})"
                " and tell your administrator",
            )
        ]


class KilledForMemory:
    """The kernel ended processes because the job's memory was used up."""

    name = "memory-events"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """A count of the kernel's, or lines of Slurm's or the kernel's, are needed."""
        return inference.name == SCRIPT_FAILED and any(
            data.get(kind) is not None for kind in (MemoryEvents, TrainingLog, KernelMessages)
        )

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Say so where there is any sign of it, and which task it was where srun names it."""
        events, log = data.get(MemoryEvents), data.get(TrainingLog)
        kernel = data.get(KernelMessages)
        lines = [note for note in (log.notes if log else ()) if _MEMORY_NOTE.search(note)]
        nodes = {each.node for each in (log.failures if log else ()) if each.line in lines}
        if kernel:
            lines += [text for text in kernel.messages if _KILL.search(text)]
        if events and events.kills:
            limit = f", limit {events.limit_bytes / 1e9:.1f} GB" if events.limit_bytes else ""
            lines.insert(0, f"kernel: {events.kills} killed for memory on {events.node}{limit}")
            nodes.add(events.node)
        if not lines:
            return ()
        return [
            Inference(
                name="killed-for-memory",
                description="the memory that the job may use on a node was used up, and the kernel"
                " killed a process",
                attribution=Attribution.USER,
                sureness=Sureness.CERTAIN,
                nodes=tuple(sorted(nodes - {""})),
                evidence=tuple(lines[:MOST_LINES]),
                advice="ask for more memory (--mem), or use less of it: fewer data loader workers,"
                " a smaller part of the data at a time",
            )
        ]


class GpuErrors:
    """The driver reported an error of a GPU that a program cannot cause."""

    name = "xid"

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """The kernel's log is needed; users often may not read it."""
        return inference.name == SCRIPT_FAILED and data.get(KernelMessages) is not None

    def infer(self, _: Inference, data: Collected) -> Sequence[Inference]:
        """Judge Xids by NVIDIA's catalogue, as the checks of nodes do."""
        kernel = data.get(KernelMessages)
        assert kernel is not None
        found = []
        for text in kernel.messages:
            match = _XID.search(text)
            if match and judge_xid(int(match["number"]), match["text"])[0] is Status.NODE_FAULT:
                found.append((match, text))
        if not found:
            return ()
        match = found[0][0]
        means = judge_xid(int(match["number"]), match["text"])[1]
        return [
            Inference(
                name="gpu-broken",
                description=f"GPU {match['bus']} of {kernel.node} failed: Xid {match['number']},"
                f" {means.partition(';')[0]}",
                attribution=Attribution.NODE,
                sureness=Sureness.CERTAIN,
                nodes=(kernel.node,),
                evidence=tuple(text for _match, text in found[:MOST_LINES]),
                advice=f"leave out {kernel.node} (sbatch --exclude={kernel.node}) and tell your"
                " administrator",
            )
        ]


def _sureness_of_loss(lost: Mapping[str, str], data: Collected) -> Sureness:
    """A node that is down ended the job; one that only does not answer need not have.

    Where all of several nodes are gone, the trouble is more likely Slurm's or the network's.
    """
    end, log = data.get(ScriptEnd), data.get(TrainingLog)
    if end and len(lost) == len(end.nodes) > 1:
        return Sureness.POSSIBLE
    if any(_is_down(said) for said in lost.values()):
        return Sureness.CERTAIN
    return Sureness.POSSIBLE if log and log.of_their_own else Sureness.LIKELY


def _is_down(said: str) -> bool:
    return "Node failure" in said or any(word in said for word in _LOST_STATES)
