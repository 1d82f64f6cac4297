# SPDX-License-Identifier: Apache-2.0
"""Causes beside a job's output: by Slurm, kernels, drivers and the monitor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    KINDS,
    OUT_OF_MEMORY,
    KernelError,
    device_error,
    of_line,
)
from slurm_health.records.nodeset import is_down, is_lost
from slurm_health.records.script_records import (
    HUNG,
    MOST_LINES,
    RANK_FAILED,
    RANK_GONE,
    REQUEUED,
    SCRIPT_FAILED,
    TIME_LIMIT,
    Diagnosed,
    TrainingEvent,
    advice_afterwards,
)
from slurm_health.records.text import listed
from slurm_health.report.sentences import event_text, hung_text
from slurm_health.training.diagnosis.collected import (
    MonitorReport,
    NodeStates,
    ScriptEnd,
    SlurmView,
    TrainingLog,
    exclude_options,
    failed_ranks,
)
from slurm_health.training.diagnosis.rows import Row
from slurm_health.training.diagnosis.samples import Standstill
from slurm_health.training.diagnosis.words_of_launchers import (
    A_NODE_LOST,
    BY_FACT,
    HELD,
    NODE_LOST,
    REFUSALS,
)
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# Ends from outside, by Slurm's job states, and by its words for their reasons.
_OUTSIDE = {
    "CANCELLED": ("the job was cancelled", ""),
    "PREEMPTED": ("the job was preempted by another one", "it goes on when it is started again"),
    "REQUEUED": ("the job was requeued (scontrol requeue)", ""),
    "PENDING": ("the job was requeued", ""),
    "TIMEOUT": (TIME_LIMIT, "ask for more time (--time), or save more often"),
    "DEADLINE": ("the job reached its deadline", ""),
}
_DUE_TO = {
    "DUE TO TIME LIMIT": "TIMEOUT",
    "DUE TO PREEMPTION": "PREEMPTED",
    "DUE TO JOB REQUEUE": "REQUEUED",
}
_BACK_IN_THE_QUEUE = frozenset({"REQUEUED", "PENDING"})
_REFUSED = re.compile(
    "|".join(kind.pattern for kind in KINDS if kind.error.name == "gpu-reset-required")
    + r"|^NVRM: (?:GPU \S+: )?(?:RmInitAdapter|rm_init_adapter) failed"
)
# A context that does not switch: also what follows if a program's own error stopped its kernel.
_CONTEXT = "Xid 109"
_KERNELS_OWN = "kernel-log"  # the check of errors that are no device's
_DOMAIN = 3  # so many nodes with the same error share one cause, which may be at none of them


def ended_from_outside(_: Inference, data: DataManager) -> Inference | None:
    """Slurm, or a user by it, ended the job: by the job's state, or the output.

    A hang that ran into the time limit, or that our monitor ended, is the cause; anyone else may
    end a job for another reason.
    """
    end, view, log = data.get(ScriptEnd), data.get(SlurmView), data.get(TrainingLog)
    # A script may print what Slurm writes of another job.
    lines = [
        fact.text
        for fact in (log.of("cancelled") if log else ())
        if not (end and end.job) or fact.value == end.job
    ]
    states = list(view.job_states if view else ())
    for line in lines:
        states += [state for words, state in _DUE_TO.items() if words in line]
        states += [] if "DUE TO" in line else ["CANCELLED"]
    state = next((state for state in _OUTSIDE if state in states), None)
    # Slurm itself cancels a job that used up its memory, and users cancel what then hangs.
    if state is None or (state == "CANCELLED" and log and log.of("memory-kill")):
        return None
    means, advice = _OUTSIDE[state]
    evidence = lines[-1:] or [f"Slurm: the job's state is {state}"]
    monitor = data.get(MonitorReport)
    hang = monitor.hang if monitor else None
    if monitor and hang and hang.diagnosed and state not in _BACK_IN_THE_QUEUE:
        evidence.append(_line_of(hang))
        own = state == "CANCELLED" and monitor.cancels
        if own or state == "TIMEOUT":
            until = "slurm-health cancelled the job (--monitor=stop)" if own else means
            return _hung_until(until, hang.diagnosed, evidence)
        means = f"{means} while the training hung"
        advice = advice_afterwards(hang.diagnosed)
        evidence.append(hang.diagnosed.description)
    elif state == "TIMEOUT" and log and log.watchdogs:
        means = f"{means} after NCCL's watchdog reported ranks that waited for others"
        advice = (
            "look for the rank that they waited for, which --flight-recorder=on names at the next"
            " hang: more time alone does not help"
        )
        evidence += [failure.line for failure in log.failures if failure.consequence]
    return Inference(
        name=REQUEUED if state in _BACK_IN_THE_QUEUE else "ended-from-outside",
        description=means,
        attribution=Attribution.OUTSIDE,
        sureness=Sureness.CERTAIN,
        evidence=tuple(evidence[:MOST_LINES]),
        advice=advice,
    )


def hung_until_ended(_: Inference, data: DataManager) -> Inference | None:
    """The training hung until slurm-health ended the script, which explains how it ended."""
    monitor = data.get(MonitorReport)
    hang = monitor.hang if monitor and monitor.ends_script else None
    if hang is None or hang.diagnosed is None:
        return None
    ended = "slurm-health ended the script, as --monitor asks"
    return _hung_until(ended, hang.diagnosed, [_line_of(hang)])


def hung_before_failure(inference: Inference, data: DataManager) -> Inference | None:
    """The training hung until a timeout ended it; as sure as the monitor was of where.

    The hang was not over, and no rank explains the failure by itself.
    """
    monitor, log = data.get(MonitorReport), data.get(TrainingLog)
    hang = monitor.hang if monitor else None
    if hang is None or hang.diagnosed is None:
        return None
    own = log.of_their_own if log else ()
    if inference.name == RANK_FAILED and (not own or own[0].signal == 0 or own[0].error):
        return None
    if inference.name == SCRIPT_FAILED and log is not None and log.failures:
        return None
    cause = hang.diagnosed
    return Inference(
        name=cause.cause,
        description=hung_text(cause.description, "before it failed"),
        attribution=Attribution(cause.attribution),
        sureness=Sureness[cause.sureness.upper()],
        nodes=tuple(cause.nodes),
        ranks=tuple(cause.ranks),
        evidence=(_line_of(hang), *cause.evidence),
        advice=advice_afterwards(cause),
    )


def _hung_until(ended: str, cause: Diagnosed, evidence: Sequence[str]) -> Inference:
    sure = Sureness[cause.sureness.upper()] >= Sureness.LIKELY
    return Inference(
        name=HUNG,
        description=hung_text(cause.description, f"until {ended}"),
        attribution=Attribution(cause.attribution) if sure else Attribution.UNDECIDED,
        sureness=Sureness.CERTAIN,
        nodes=tuple(cause.nodes) if sure else (),
        ranks=tuple(cause.ranks),
        evidence=(*evidence, cause.description, *cause.evidence),
        advice=advice_afterwards(cause),
    )


def _line_of(hang: TrainingEvent) -> str:
    return f"monitor: {event_text(hang)} when it was reported"


def slow_before(cause: Inference, data: DataManager) -> list[str]:
    """Return earlier slowness as lines of evidence: on the nodes of a cause, if it has any."""
    monitor = data.get(MonitorReport)
    nodes = set(cause.nodes)
    slow = [why for why in (monitor.slow if monitor else ()) if not nodes or nodes & {*why.nodes}]
    return list(dict.fromkeys(f"monitor, before that: {why.description}" for why in slow))


def lost_node(_: Inference, data: DataManager) -> Inference | None:
    """Slurm has lost a node of the job: it is down or does not answer, by srun or by Slurm.

    A node that is down ended the job; one that only does not answer need not have. If all of
    several nodes are gone, the trouble is more likely Slurm's or the network's.
    """
    view, log, end = data.get(SlurmView), data.get(TrainingLog), data.get(ScriptEnd)
    states = view.node_states if view else {}
    nodes = end.nodes if end else ()
    by_srun = {fact.node: fact.text for fact in (log.of("node-lost") if log else ())}
    lines = {node: text for node, text in by_srun.items() if node in nodes}
    lines |= {node: f"Slurm: {node} is {state}" for node, state in states.items() if is_lost(state)}
    unnamed = log.of("a-node-lost") if log else ()
    if not lines:
        texts = tuple(fact.text for fact in unnamed[:MOST_LINES])
        return A_NODE_LOST.inference(evidence=texts) if texts else None
    sureness = Sureness.POSSIBLE if log and log.of_their_own else Sureness.LIKELY
    states_of_lost = [states.get(node, "") for node in lines]
    if any(not is_lost(state) or is_down(state) for state in states_of_lost):
        sureness = Sureness.CERTAIN
    if len(lines) == len(nodes) > 1:
        sureness = Sureness.POSSIBLE
    return replace(_of_nodes(NODE_LOST, lines, data), sureness=sureness)


def slurm_names_a_node(_: Inference, data: DataManager) -> Inference | None:
    """Slurm, or an MPI's launcher, names a node: its memory, its daemon, or a launch that failed.

    After a failed launch no part of the script ran. A node is likely at fault if it alone of
    several refused for a reason of its own.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None:
        return None
    nodes = end.nodes if end else ()
    for kind, row in BY_FACT.items():
        named = {fact.node: fact.text for fact in log.of(kind) if fact.node in nodes}
        if named:
            return _of_nodes(row, named, data)
    if held := log.of("held"):
        return HELD.inference(evidence=(held[0].text,))
    kinds = ("launch-failed", "batch-refused", "prolog", "credential")
    refused = next((facts for kind in kinds if (facts := log.of(kind))), ())
    if not refused:
        return None
    named = {fact.node: fact.text for fact in refused if fact.node in (nodes or [fact.node])}
    named.pop("", None)
    row = next(row for row in REFUSALS if row.fits(refused[0].value))
    if not named and row is not REFUSALS[0]:
        row = REFUSALS[-1]
    cause = _of_nodes(row, named, data, why=refused[0].value)
    few = len(named) <= len(nodes) / 2 or row.blame is Attribution.USER
    return replace(
        cause,
        attribution=cause.blame if few else Attribution.UNDECIDED,
        evidence=tuple(fact.text for fact in refused[:MOST_LINES]),
    )


def _of_nodes(row: Row, lines: Mapping[str, str], data: DataManager, **names: str) -> Inference:
    """Return the inference of a row about nodes, with a line of every one."""
    nodes = tuple(sorted(lines))
    leave = f"start again without {listed(nodes)} ({exclude_options(nodes, data)})" if nodes else ""
    names |= {"nodes": listed(nodes) or "a node", "node": "".join(nodes[:1]), "leave": leave}
    evidence = tuple(lines[node] for node in nodes)[:MOST_LINES]
    return row.inference(names, nodes=nodes, evidence=evidence)


def killed_for_memory(inference: Inference, data: DataManager) -> Inference | None:
    """The kernel ended processes because the job's memory was used up.

    By the kernel's count, or by lines of Slurm's. The kernel's own lines may be about any job of
    the node, and so count only if its count could not be read. For a rank that is gone while the
    others wait, only its own node counts.
    """
    log, reports = data.get(TrainingLog), data.get(NodeStates)
    lines = [fact.text for fact in (log.of("memory-kill") if log else ())]
    nodes = {failure.node for failure in (log.failures if log else ()) if failure.line in lines}
    for node in reports.nodes if reports else ():
        if inference.name == RANK_GONE and node.node not in inference.nodes:
            continue
        if "memory kills" in node.unavailable:
            lines += [text for text in node.kernel if re.search(OUT_OF_MEMORY, text)]
        if node.kills:
            limit = f", limit {node.limit_bytes / 1e9:.1f} GB" if node.limit_bytes else ""
            lines.insert(0, f"kernel: {node.kills} killed for memory on {node.node}{limit}")
            nodes.add(node.node)
    if not lines:
        return None
    named = tuple(sorted(nodes - {""}))
    return Inference(
        name="killed-for-memory",
        description=f"the job used up its memory on {listed(named) or 'a node'}, and the kernel"
        " killed a process",
        attribution=Attribution.USER,
        sureness=Sureness.CERTAIN,
        nodes=named,
        ranks=inference.ranks,
        evidence=tuple(lines[:MOST_LINES]),
        advice="ask for more memory (--mem), or use less of it: fewer data loader workers,"
        " a smaller part of the data at a time",
    )


def gpu_errors(_: Inference, data: DataManager) -> Inference | None:
    """The driver of a node reports an error of a GPU that a program cannot cause.

    Numbers are judged as by the checks of nodes; then come words without a number, and NVML's
    present state, which may be newer than the failure.
    """
    reports = data.get(NodeStates)
    nodes = reports.nodes if reports else ()
    errors: dict[str, list[tuple[KernelError, str]]] = {}
    refused: dict[str, list[str]] = {}
    by_a_program: set[tuple[str, str]] = set()  # nodes, and addresses of GPUs
    for node in nodes:
        for line in node.kernel:
            error = device_error(line)
            if error and error.whose == "program":
                by_a_program.add((node.node, error.bus))
            elif error and error.name == _CONTEXT and (node.node, error.bus) in by_a_program:
                continue
            elif error and error.status is Status.NODE_FAULT:
                errors.setdefault(node.node, []).append((error, line))
            elif _REFUSED.search(line):
                refused.setdefault(node.node, []).append(line)
    if errors:
        # If a GPU of an NVLink domain fails, or its fabric does, all of its nodes report the same:
        # those with other errors than most are accused.
        kinds = {node: frozenset(error.name for error, _ in of) for node, of in errors.items()}
        alike, many = Counter(kinds.values()).most_common(1)[0]
        others = tuple(node for node, names in kinds.items() if names != alike)
        apart = others and many >= _DOMAIN and many > len(others)
        accused = others if apart else tuple(kinds)
        error, line = errors[accused[0]][0]
        device = f"GPU {error.bus}" if error.bus else "a GPU"
        name = f"{error.name}, " if error.name.partition(" ")[2] in line else ""
        says = f"{device} of {accused[0]} failed: {name}{error.what}"
        lines = {node: [line for _, line in errors[node]] for node in accused}
        # A link ends where its other end has failed, too, which may be on another node.
        sureness = Sureness.LIKELY if error.whose == "link" else Sureness.CERTAIN
        return _gpu_broken(says, lines, sureness, data, len(errors))
    if refused:
        says = f"the driver of {next(iter(refused))} refuses to use a GPU, or cannot start it"
        return _gpu_broken(says, refused, Sureness.LIKELY, data, len(refused))
    lost = {node.node: node.lost_gpus for node in nodes if node.lost_gpus}
    if not lost:
        return None
    first = next(iter(lost))
    lines = {node: [f"NVML: {words}" for words in gpus] for node, gpus in lost.items()}
    return _gpu_broken(f"{first}: {lost[first][0]}", lines, Sureness.LIKELY, data, len(lost))


def _gpu_broken(
    says: str,
    lines: Mapping[str, Sequence[str]],
    sureness: Sureness,
    data: DataManager,
    reporting: int,
) -> Inference:
    """Return that GPUs of nodes failed. The same errors of several nodes have one cause."""
    nodes, log, stands = tuple(lines), data.get(TrainingLog), data.get(Standstill)
    failed = [failure for failure in (log.failures if log else ()) if failure.node in nodes]
    # Ranks that only waited for the rank of this GPU may be on the same node.
    own = [failure for failure in failed if not failure.consequence] or failed
    stopped = [rank.rank for rank in (stands.ranks if stands else ()) if rank.node in nodes]
    one = len(nodes) == 1
    evidence = [line if one else f"{node}: {line}" for node, of in lines.items() for line in of]
    domain = len(nodes) == reporting >= _DOMAIN
    more = f"; {listed(nodes)} report such errors alike: the cause may be one for all, as a link's"
    return Inference(
        name="gpu-broken",
        description=says + (f"{more} or a switch's" if domain else ""),
        attribution=Attribution.UNDECIDED if domain else Attribution.NODE,
        sureness=Sureness.LIKELY if domain else sureness,
        nodes=nodes,
        ranks=tuple(sorted({*failed_ranks(own), *stopped})),
        evidence=tuple(evidence[:MOST_LINES]),
        advice=f"leave out {listed(nodes)} ({exclude_options(nodes, data)}) and tell your"
        " administrator",
    )


def broken_hardware(_: Inference, data: DataManager) -> Inference | None:
    """The kernel of a node reports broken hardware, which possibly ended the script."""
    reports = data.get(NodeStates)
    for node in reports.nodes if reports else ():
        errors: dict[str, tuple[KernelError, list[str]]] = {}
        for line in node.kernel:
            error = of_line(line)
            if error and error.status is Status.NODE_FAULT and error.check == _KERNELS_OWN:
                errors.setdefault(error.name, (error, []))[1].append(line)
        errors.pop("gpu-reset-required", None)
        for error, lines in errors.values():
            return Inference(
                name=error.name,
                description=f"the kernel of {node.node} reports: {error.what}",
                attribution=Attribution.NODE,
                sureness=Sureness.POSSIBLE,
                nodes=(node.node,),
                evidence=tuple(lines[:MOST_LINES]),
                advice=f"tell your administrator: {error.helps}",
            )
    return None
