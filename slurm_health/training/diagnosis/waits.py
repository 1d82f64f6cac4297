# SPDX-License-Identifier: Apache-2.0
"""Ranks that waited for each other: in what, for whom, or for a rendezvous that never formed.

All sources are merged in one `CollectiveState`. Dumps of the Flight Recorder know most, then NCCL's
watchdogs, then NCCL's own answer (RAS).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import replace

from slurm_health.records.script_records import (
    MOST_LINES,
    NEVER_ENTERED,
    NO_PROGRESS,
    OUT_OF_STEP,
    SCRIPT_FAILED,
)
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    Listeners,
    NodeStates,
    RankFailure,
    ScriptEnd,
    TrainingLog,
    failed_nodes,
    failed_ranks,
)
from slurm_health.training.diagnosis.collectives import CollectiveState, Difference, FlightRecord
from slurm_health.training.diagnosis.ras import RasStatus, records_of
from slurm_health.training.diagnosis.rows import On, Row
from slurm_health.training.diagnosis.samples import (
    Doing,
    RankSample,
    Standstill,
    nodes_of,
    place_of,
    ranks_of,
    who,
)
from slurm_health.training.diagnosis.words import ADAPTER_ERRORS, known
from slurm_health.training.diagnosis.words_of_launchers import WAITS, common
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_JOIN = "torch/distributed/algorithms/join.py"
_MORE_BATCHES = (
    "give all ranks the same number of batches (drop_last=True, a sampler that pads), or train"
    " below torch.distributed.algorithms.join.Join"
)
_MANY_TO_ONE = 4  # ranks that wrote to one that did not: then its silence says something
# WorkNCCL(SeqNum=1042, OpType=ALLREDUCE, NumelIn=...
_TIMED_OUT = re.compile(r"SeqNum=(?P<number>\d{1,15}), OpType=(?P<what>\w{1,40})")


def ranks_parted(inference: Inference, data: DataManager) -> Inference | None:
    """Ranks called different collectives, or some never entered the one of the others.

    Of a script that has ended, a wrong call is a rank's failure, and a rank that never came is
    behind the wait of the others.
    """
    difference = _difference(data)
    if difference is None:
        return None
    # The nodes of ranks, by their agents, or by their ends.
    log = data.get(TrainingLog)
    nodes = {failure.rank: failure.node for failure in (log.failures if log else ())}
    nodes |= {sample.rank: sample.node for sample in _ranks(data)}
    where = {node for rank, node in nodes.items() if rank in difference.ranks and node}
    is_over = inference.name != NO_PROGRESS
    if is_over and (inference.name == SCRIPT_FAILED) != difference.mismatched:
        return None
    ranks = ranks_text(difference.ranks) if difference.ranks else "it"
    parted = Inference(
        name=NEVER_ENTERED,
        description=difference.description,
        sureness=Sureness.POSSIBLE if difference.apart and difference.counted else Sureness.LIKELY,
        nodes=tuple(sorted(where)),
        ranks=difference.ranks,
        evidence=difference.evidence,
        advice=f"look at what {ranks} did instead: the data loader, a filesystem, a GPU",
    )
    if difference.of_a_step:
        several = len(difference.ranks) > 1
        are, leave = ("are", "these ranks leave") if several else ("is", "this rank leaves")
        return replace(
            parted,
            name=OUT_OF_STEP,
            description=f"{ranks} {are} not at the step of the others: {difference.description}",
            attribution=Attribution.USER,
            advice=f"{_MORE_BATCHES}; or check whether {leave} out a call of the others",
        )
    if difference.mismatched:
        return replace(
            parted,
            name="mismatched-collective",
            attribution=Attribution.USER,
            sureness=Sureness.CERTAIN,
            advice="have all ranks call the same collectives with the same sizes in the"
            " same order, and give all the same number of batches",
        )
    if difference.counted:
        # A work counts as enqueued, or launched, once NCCL's call for it has returned.
        which = "; any of them may hold up all others" if difference.apart else ""
        return replace(
            parted,
            description=f"{difference.description}, or is held inside the call of it{which}",
            advice=f"{parted.advice}; --flight-recorder=on shows more of the next hang",
        )
    return parted


def _difference(data: DataManager) -> Difference | None:
    """Return the difference by the first source that shows one, merged with better sources."""
    flights, log, status = data.get(FlightRecords), data.get(TrainingLog), data.get(RasStatus)
    records: list[FlightRecord] = []
    for source in (
        flights.records if flights else (),
        log.progress if log else (),
        records_of(status, _ranks(data)) if status else (),
    ):
        records += source
        state = CollectiveState(records)
        if source and len(state.records) > 1 and state.difference is not None:
            return state.difference
    return None


def data_ended_before(_: Inference, data: DataManager) -> Inference | None:
    """The data of some ranks has ended, and that of the others has given more.

    Ranks report their numbers of batches, and wait in different collectives. The fewer are named:
    those whose data ended before, or those that go on.
    """
    ranks = _ranks(data)
    ended = [rank for rank in ranks if rank.data_ended and not rank.gone]
    others = [rank for rank in ranks if not rank.data_ended]
    if not ended or not others or not all(rank.batches for rank in ranks):
        return None
    # If all meet the end after the same number of batches, it is that of an epoch.
    last = max(rank.batches for rank in ended)
    if any(rank.batches != last for rank in ended) or any(rank.batches <= last for rank in others):
        return None
    sureness = _sureness_of_parting(data)
    if sureness is None:
        return None
    few = min(ended, others, key=len)
    batches = f"{last} batch{'es' if last != 1 else ''}"
    rest = ranks_text(ranks_of(others if few is ended else ended))
    if few is ended:
        is_ = "is" if len(few) == 1 else "are"
        what = f"{is_} behind {rest}: the data there ended after {batches}"
    else:
        goes = "goes" if len(few) == 1 else "go"
        what = f"{goes} on with batch {others[0].batches}: the data of {rest} ended before"
    lines = (
        f"rank {rank.rank} on {rank.node}: its data gave {rank.batches} batches"
        + (", and then ended" if rank.data_ended else "")
        for rank in (*few, *(rank for rank in ranks if rank not in few))
    )
    return Inference(
        name=OUT_OF_STEP,
        description=f"{who(few)} {what}",
        attribution=Attribution.USER,
        sureness=sureness,
        nodes=nodes_of(few),
        ranks=ranks_of(few),
        evidence=tuple(lines)[:MOST_LINES],
        advice=_MORE_BATCHES,
    )


def _sureness_of_parting(data: DataManager) -> Sureness | None:
    """Return how sure it is that ranks are in different collectives, None if they may not be.

    A rank in none may have more work than the others, such as an evaluation. Below `Join`, uneven
    data is normal.
    """
    stacks = [rank.stack for rank in _ranks(data)]
    if any(frame.file.endswith(_JOIN) for stack in stacks for frame in stack):
        return None
    flights = data.get(FlightRecords)
    difference = CollectiveState(flights.records).difference if flights else None
    if difference is not None:
        return Sureness.CERTAIN if difference.mismatched else None
    places = list(map(place_of, stacks))
    inside = all(place.doing is Doing.COLLECTIVE for place in places)
    return Sureness.LIKELY if inside and len({place.what for place in places}) > 1 else None


def _ranks(data: DataManager) -> tuple[RankSample, ...]:
    standstill = data.get(Standstill)
    return standstill.ranks if standstill else ()


def why_ranks_waited(inference: Inference, data: DataManager) -> Inference | None:
    """No rank failed by itself: they waited in a collective, or never met.

    Without a known cause it is only possible: a rank that lags behind also waits elsewhere.
    """
    log = data.get(TrainingLog)
    failures = log.failures if log else ()
    errors = [failure.error for failure in failures if failure.error]
    if failures and not errors:
        names = ranks_text(failed_ranks(failures)) if failed_ranks(failures) else "processes"
        return replace(
            inference,
            name="killed",
            description=f"{names} ended by SIGTERM; the collected data does not show the sender",
            advice="find the sender: a launcher, scancel, or the script itself",
        )
    row = common(WAITS, errors) if errors else WAITS[-1]
    if row is WAITS[0] or (row is WAITS[-1] and log and log.of("port-taken")):
        return _never_met(data)
    by_call: dict[str, list[RankFailure]] = {}  # by the function that a traceback ends in
    by_work: dict[str, list[RankFailure]] = {}  # by the work that a watchdog timed out
    for failure in failures:
        if failure.rank is None:
            continue
        if failure.waits_in:
            by_call.setdefault(failure.waits_in, []).append(failure)
        if match := _TIMED_OUT.search(failure.error):
            work = f"{match['what'].lower()} (number {match['number']})"
            by_work.setdefault(work, []).append(failure)
    if len(by_call) > 1:
        return Inference(
            name="collectives-differ",
            description="ranks waited for each other in different collectives ("
            + "; ".join(f"{ranks_text(failed_ranks(f))} in {what}" for what, f in by_call.items())
            + "): the script calls different ones on them, or one rank lagged behind",
            attribution=Attribution.USER,
            ranks=failed_ranks([waiting[0] for waiting in by_call.values()]),
            evidence=tuple(waiting[0].line for waiting in by_call.values())[:MOST_LINES],
            advice="check whether every rank calls the same collectives in the same order; to"
            " know, start again with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        )
    # Numbers count within a group: they compare only if all lines are of the group of all ranks.
    (few, of_few), *rest = sorted(by_work.items(), key=lambda item: len(item[1])) or [("", [])]
    if len(rest) == 1 and len(of_few) < len(rest[0][1]) and log and not log.subgroups:
        other, of_other = rest[0]
        ranks = ranks_text(failed_ranks(of_few))
        return Inference(
            name="collective-timed-out",
            description=f"{ranks} waited in {few} while {ranks_text(failed_ranks(of_other))} waited"
            f" in {other}: they called different collectives, some lag behind, or a connection"
            " carried no data",
            ranks=failed_ranks(of_few),
            evidence=(of_few[0].line, of_other[0].line),
            advice=f"look at the last lines of {ranks}; check whether every rank calls the"
            " same collectives in the same order",
        )
    return _of_connections(row, inference, data)


def warned_of_connections(inference: Inference, data: DataManager) -> Inference | None:
    """NCCL warned of its connections, and no process reported a failure."""
    log = data.get(TrainingLog)
    if log is None or log.failures:
        return None
    explained = any(known(fact.value) for fact in log.of("nccl-warning"))
    if not (explained or log.of("adapter") or log.of("peer-gone")):
        return None
    lines = tuple(fact.text for fact in log.of("peer-gone")[:MOST_LINES])
    return _of_connections(WAITS[-1], replace(inference, evidence=lines), data)


def _of_connections(row: Row, inference: Inference, data: DataManager) -> Inference:
    """Ranks waited in vain: for a silent node, an adapter, or by the row's own meaning."""
    log, reports = data.get(TrainingLog), data.get(NodeStates)
    silent = reports.silent if reports and reports.nodes else ()
    if reports and silent:
        return Inference(
            name="node-silent",
            description=f"ranks waited in vain, and {listed(silent)} did not answer: the node,"
            " or the network to it",
            nodes=silent,
            ranks=inference.ranks,
            evidence=(reports.why_silent or "no answer in time", *inference.evidence),
            advice=f"check whether Slurm still reaches it: scontrol show node {silent[0]}",
        )
    if log and (adapters := log.of("adapter")):
        # A failed send concerns the peer and the network as well.
        ports = tuple(sorted({fact.node for fact in adapters if " async " in fact.value}))
        lines = [f"NCCL on {fact.node}: {fact.value}" for fact in adapters[:MOST_LINES]]
        cause = ADAPTER_ERRORS.inference(
            ranks=inference.ranks, nodes=ports, evidence=(*lines, *inference.evidence[:1])
        )
        return replace(cause, sureness=Sureness.POSSIBLE)
    errors = [failure.error for failure in (log.failures if log else ())]
    warnings = log.of("nccl-warning") if log else ()
    texts = [*errors, *(fact.value for fact in warnings)]
    if row.name == "interrupted" and log:  # libraries send SIGINT, too, after words of a crash
        rows = {words.text: known(words.text) for words in log.words}
        texts += (text for text, why in rows.items() if why and On.CRASH in why.on)
    if reason := next((why for text in texts if (why := known(text))), None):
        lines = [fact.text for fact in warnings if reason.fits(fact.value)][:1]
        evidence = tuple(dict.fromkeys((*lines, *inference.evidence)))
        return replace(
            reason.inference(ranks=inference.ranks, evidence=evidence),
            attribution=Attribution.UNDECIDED,
            sureness=Sureness.POSSIBLE,
        )
    cause = row.inference(ranks=inference.ranks, evidence=inference.evidence)
    ranks = {failure.rank for failure in (log.failures if log else ()) if failure.rank is not None}
    mute = sorted({*range(max(ranks, default=0))} - ranks)
    if row.name == "collective-timed-out" and 0 < len(mute) <= len(ranks) / _MANY_TO_ONE:
        says = (
            f"{cause.description}; the watchdogs of all others reported, {ranks_text(mute)} wrote"
        )
        return replace(cause, description=f"{says} nothing", ranks=tuple(mute))
    return cause


def _never_met(data: DataManager) -> Inference:
    """The ranks never met: their port was in use, or their address is no node of the job.

    Unlike after a broken connection, the same again fails again.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    assert log is not None
    if taken := log.of("port-taken"):
        return port_taken(taken[0].value, taken[0].text, data)
    to = next(iter(log.of("connect")), None)
    nodes = end.nodes if end else ()
    host = to.value.strip("[]").removeprefix("::ffff:") if to else ""
    known = {"localhost", *(node.partition(".")[0].lower() for node in nodes)}
    is_foreign = bool(nodes) and host.partition(".")[0].lower() not in known
    with contextlib.suppress(ValueError):  # an address may be any node's
        ipaddress.ip_address(host)
        is_foreign = False
    if to and is_foreign:
        return Inference(
            name="wrong-master-address",
            description=f"the ranks never met: their rendezvous at {to.value} is on no node of"
            f" the job ({listed(nodes)})",
            attribution=Attribution.USER,
            sureness=Sureness.LIKELY,
            evidence=(to.text,),
            advice="set MASTER_ADDR (--rdzv-endpoint) to a node of the job:"
            " $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1); if it is another name of"
            " one, check that a rank listens there",
        )
    return WAITS[0].inference(
        {"where": f" at {to.value}" if to else ""},
        nodes=failed_nodes(log.failures),
        evidence=tuple(failure.line for failure in log.failures[:MOST_LINES]),
    )


def port_taken(port: str, text: str, data: DataManager) -> Inference:
    """The rendezvous port was in use; the owner is known if it is on the batch host."""
    listeners = data.get(Listeners)
    holder = listeners.holders.get(int(port), "") if listeners else ""
    by = f"by {holder}" if holder else "by another job or process on that node"
    return Inference(
        name="port-in-use",
        description=f"port {port}, where the ranks were to meet, was in use {by}",
        attribution=Attribution.TRANSIENT,
        sureness=Sureness.LIKELY,
        evidence=(text,),
        advice=f"choose the port by the job's number instead of {port}"
        " (MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))); `ss -tlnp` on the node shows its"
        " owner",
    )
