# SPDX-License-Identifier: Apache-2.0
"""Failures without a rank that failed by itself: a launch that failed, ranks that waited."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import replace

from slurm_health.records.script_records import MOST_LINES, NEVER_ENTERED
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    Listeners,
    NodesTold,
    RankFailure,
    ScriptEnd,
    TrainingLog,
    failed_nodes,
    failed_ranks,
    leaving_out,
)
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.diagnosis.waits import nodes_of_ranks
from slurm_health.training.diagnosis.words import Row
from slurm_health.training.diagnosis.words_of_launchers import REFUSALS, WAITS, common
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# WorkNCCL(SeqNum=1042, OpType=ALLREDUCE, NumelIn=...
_TIMED_OUT = re.compile(r"SeqNum=(?P<number>\d{1,15}), OpType=(?P<what>\w{1,40})")


def launch_failed(_: Inference, data: DataManager) -> Inference | None:
    """Slurm could not launch a step on some nodes, and says why: nothing of the script ran there.

    A node is likely at fault where it alone of several refused for a reason of its own.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    refused = log.of("launch-failed") if log else ()
    if log and (held := log.of("held")):
        return Inference(
            name="launch-failed",
            description="Slurm could not start the job's script on a node, has put the job back,"
            " and holds it until it is released",
            attribution=Attribution.NODE,
            sureness=Sureness.LIKELY,
            evidence=(held[0].text,),
            advice="see which node it was (sacct --duplicates -o JobID,NodeList,State; sinfo -R)"
            " and tell your administrator; then exclude it (scontrol update JobId=...,"
            " ExcNodeList=...) and release the job (scontrol release)",
        )
    job_nodes = end.nodes if end else ()
    ours = [fact for fact in refused if fact.node in (job_nodes or [fact.node]) and fact.node]
    if not refused:
        return None
    nodes = tuple(dict.fromkeys(fact.node for fact in ours))
    row = next(row for row in (REFUSALS if nodes else REFUSALS[-1:]) if row.fits(refused[0].value))
    at_fault = row.blame is Attribution.NODE and len(nodes) <= len(job_nodes) / 2
    leave = f"start again without {listed(nodes)} ({leaving_out(nodes, data)})" if nodes else ""
    names = {"nodes": listed(nodes), "node": "".join(nodes[:1])}
    names |= {"why": refused[0].value, "leave": leave}
    return Inference(
        name=row.name,
        description=row.says.format(**names),
        attribution=Attribution.NODE if at_fault else Attribution.UNDECIDED,
        sureness=Sureness.LIKELY,
        nodes=nodes,
        evidence=tuple(fact.text for fact in refused[:MOST_LINES]),
        advice=row.advice.format(**names),
    )


def why_ranks_waited(inference: Inference, data: DataManager) -> Inference | None:
    """No rank failed by itself: what they waited in, or that they never met.

    Possible only where what broke is not told: a rank that lags behind also waits elsewhere.
    """
    log = data.get(TrainingLog)
    failures = log.failures if log else ()
    errors = [each.error for each in failures if each.error]
    row = common(WAITS, errors) if errors else WAITS[-1]
    if row is WAITS[0]:
        return _never_met(data)
    waits: dict[str, list[RankFailure]] = {}
    for each in failures:
        if each.waits_in and each.rank is not None:
            waits.setdefault(each.waits_in, []).append(each)
    if len(waits) > 1:
        said = [f"{ranks_text(failed_ranks(each))} in {what}" for what, each in waits.items()]
        return Inference(
            name="collectives-differ",
            description="ranks waited for each other in different collectives ("
            + "; ".join(said)
            + "): the script lets them call different ones, or one of them lagged behind",
            attribution=Attribution.USER,
            ranks=failed_ranks([each[0] for each in waits.values()]),
            evidence=tuple(each[0].line for each in waits.values())[:MOST_LINES],
            advice="check whether every rank calls the same collectives in the same order; to"
            " know, start again with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )
    if behind := _behind(failures, data):
        return behind
    return _of_connections(row, inference, data)


def _behind(failures: Sequence[RankFailure], data: DataManager) -> Inference | None:
    """Some ranks timed out in another collective than the others, as NCCL's watchdogs number them.

    Numbers count within a group, so they are compared only if all lines are of the group of all
    ranks.
    """
    log = data.get(TrainingLog)
    if log is None or log.subgroups:
        return None
    where: dict[tuple[int, str], list[RankFailure]] = {}
    for failure in failures:
        match = _TIMED_OUT.search(failure.error)
        if match and failure.rank is not None:
            where.setdefault((int(match["number"]), match["what"]), []).append(failure)
    if len(where) != 2:
        return None
    (few, of_few), (rest, of_rest) = sorted(where.items(), key=lambda item: len(item[1]))
    if len(of_few) == len(of_rest):
        return None
    ranks = failed_ranks(of_few)
    others = ranks_text(failed_ranks(of_rest))
    return Inference(
        name="collective-timed-out",
        description=f"{ranks_text(ranks)} waited in {few[1].lower()} (number {few[0]}) while"
        f" {others} waited in {rest[1].lower()} (number {rest[0]}): they called different"
        " collectives, some lag behind, or a connection carried nothing",
        sureness=Sureness.POSSIBLE,
        ranks=ranks,
        evidence=(of_few[0].line, of_rest[0].line),
        advice=f"look at what {ranks_text(ranks)} did before; check whether every rank calls the"
        " same collectives in the same order",
    )


def warned_of_connections(inference: Inference, data: DataManager) -> Inference | None:
    """NCCL warned of its connections, and no process told of a failure."""
    log = data.get(TrainingLog)
    if log is None or log.failures or not (log.of("adapter") or log.of("peer-gone")):
        return None
    lines = tuple(fact.text for fact in log.of("peer-gone")[:MOST_LINES])
    return _of_connections(WAITS[-1], replace(inference, evidence=lines), data)


def _of_connections(row: Row, inference: Inference, data: DataManager) -> Inference:
    """Ranks waited in vain: a node that does not answer, an adapter, or what the words mean."""
    log, told = data.get(TrainingLog), data.get(NodesTold)
    if told and told.silent and told.nodes:
        return Inference(
            name="node-silent",
            description=f"ranks waited in vain, and {listed(told.silent)} did not answer: the node,"
            " or the network to it",
            nodes=told.silent,
            ranks=inference.ranks,
            evidence=(told.why_silent or "no answer in time", *inference.evidence),
            advice=f"check whether Slurm still reaches it: scontrol show node {told.silent[0]}",
        )
    if log and (adapters := log.of("adapter")):
        # One that sends in vain says as much of its peer and the way.
        ports = tuple(sorted({fact.node for fact in adapters if " async " in fact.value}))
        where = f" of {listed(ports)}" if ports else ""
        return Inference(
            name="adapter-errors",
            description=f"network adapters reported errors{where} before the ranks gave up: a port,"
            " a cable or a switch failed, or a peer had ended",
            ranks=inference.ranks,
            nodes=ports,
            evidence=(
                *(f"NCCL on {fact.node}: {fact.value}" for fact in adapters[:MOST_LINES]),
                *inference.evidence[:1],
            ),
            advice="look at the state and the counters of the adapters (ibstat, rdma statistic) and"
            " at which rank ended first; the check before the script tests the connections",
        )
    return Inference(
        name=row.name,
        description=row.says,
        attribution=row.blame,
        sureness=row.sureness,
        ranks=inference.ranks,
        evidence=inference.evidence,
        advice=row.advice,
    )


def _never_met(data: DataManager) -> Inference:
    """The ranks never met: their port was in use, or they were sent to a host without the job.

    A rendezvous that never formed is no connection that broke: the same again fails again.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    assert log is not None
    if bound := log.of("port-taken"):
        return port_taken(bound[0].value, bound[0].text, data)
    to = next(iter(log.of("connect")), None)
    nodes = end.nodes if end else ()
    if to and nodes and not _is_of_job(to.value, nodes):
        return Inference(
            name="wrong-master-address",
            description=f"the ranks were told to meet at {to.value}, which is no node of the job"
            f" ({listed(nodes)}), and never did",
            attribution=Attribution.USER,
            sureness=Sureness.LIKELY,
            evidence=(to.text,),
            advice="set MASTER_ADDR (--rdzv-endpoint) to a node of the job:"
            " $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1); if this is another name"
            " of one, check that it listens there",
        )
    return Inference(
        name=WAITS[0].name,
        description=WAITS[0].says.format(where=f" at {to.value}" if to else ""),
        sureness=Sureness.LIKELY,
        nodes=failed_nodes(log.failures),
        evidence=tuple(failure.line for failure in log.failures[:MOST_LINES]),
        advice=WAITS[0].advice,
    )


def port_taken(port: str, text: str, data: DataManager) -> Inference:
    """The port where ranks were to meet was in use: by what, as far as the batch host shows it."""
    listeners = data.get(Listeners)
    holder = listeners.holders.get(int(port), "") if listeners else ""
    who = f"{holder} has it" if holder else "another job or process on that node had it"
    return Inference(
        name="port-in-use",
        description=f"port {port}, where the ranks were to meet, was in use: {who}",
        attribution=Attribution.TRANSIENT,
        sureness=Sureness.LIKELY,
        evidence=(text,),
        advice=f"choose the port by the job's number instead of {port}"
        " (MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))); `ss -tlnp` on the node shows who"
        " has it",
    )


def watchdog_counts(_: Inference, data: DataManager) -> Inference | None:
    """NCCL's watchdog on each rank wrote how far it came: who had not called what others waited in.

    A dump of the Flight Recorder that tells of a difference tells more.
    """
    log, flights = data.get(TrainingLog), data.get(FlightRecords)
    if log is None or len(log.progress) < 2:
        return None
    if flights is not None and CollectiveState(flights.records).difference is not None:
        return None
    state = CollectiveState([*(flights.records if flights else ()), *log.progress])
    difference = state.difference
    if difference is None:
        return None
    return Inference(
        name=NEVER_ENTERED,
        # PyTorch counts a work as enqueued once NCCL's call for it has returned.
        description=f"{difference.description}, or is held inside the call of it",
        sureness=Sureness.LIKELY,
        nodes=nodes_of_ranks(difference.ranks, data),
        ranks=difference.ranks,
        evidence=difference.evidence,
        advice=f"look at what {ranks_text(difference.ranks)} did instead: the data loader,"
        " a filesystem, a GPU; --flight-recorder=on tells more of the next hang",
    )


def _is_of_job(host: str, nodes: Sequence[str]) -> bool:
    """Tell whether a host is a node of the job, or may be: an address may be any node's."""
    name = host.strip("[]").removeprefix("::ffff:")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        short = name.partition(".")[0].lower()
        return short == "localhost" or short in {node.partition(".")[0].lower() for node in nodes}
    return True
