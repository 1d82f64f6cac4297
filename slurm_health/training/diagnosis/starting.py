# SPDX-License-Identifier: Apache-2.0
"""Failures before the ranks trained: steps that Slurm could not launch, ranks that never met."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog, leaving_out
from slurm_health.training.diagnosis.rank_failures import nodes_of
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# srun: error: Task launch for 47.0 failed on node n-c122: Invalid job credential
_LAUNCH = re.compile(
    r"srun: error: Task launch for \S+ failed on node (?P<node>[\w.-]+): (?P<why>.+)"
)
_BIND = re.compile(r"server socket has failed to bind to \S*?:(?P<port>\d{1,5})\b")
_CONNECT = re.compile(r"connect(?:ing)? to \(?(?P<host>[^\s,()]{1,253}), (?P<port>\d{1,5})\)")
_NEVER_MET = re.compile(
    r"RendezvousConnectionError|RendezvousTimeoutError|RendezvousClosedError"
    r"|client socket has (?:timed out|failed to connect)|while trying to connect to"
)


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """Why Slurm did not launch a step, by its words (`slurm_errno.h`)."""

    name: str
    pattern: re.Pattern[str]
    means: str
    advice: str
    of_the_node: bool = False


_REFUSALS = (
    _Refusal(
        name="clocks-differ",
        pattern=re.compile(r"[Jj]ob credential expired"),
        means="the credential of a step had expired when {nodes} read it: the clocks of the"
        " nodes and of slurmctld's host differ, or the launch took minutes",
        advice="tell your administrator: compare the clocks (chronyc tracking) of these nodes and"
        " of the host of slurmctld; the node that is named need not be the wrong one",
    ),
    _Refusal(
        name="launch-refused",
        pattern=re.compile(r"[Ii]nvalid job credential|authentication|[Mm]unge", re.I),
        means="{nodes} did not accept the credential of a step: munge there, its key or its"
        " daemon, does not agree with the others",
        advice="{leave} and tell your administrator: munge -n | ssh {node} unmunge",
        of_the_node=True,
    ),
    _Refusal(
        name="launch-failed",
        pattern=re.compile(
            r"could not create|No space left|[Rr]ead-only|User not found|could not set up"
            r"|[Ii]nvalid user|slurmd internal error"
        ),
        means="{nodes} could not launch a step: its spool directory, its disk or its accounts",
        advice="{leave} and tell your administrator (SlurmdSpoolDir, slurmd's log there)",
        of_the_node=True,
    ),
)


def launch_failed(_: Inference, data: DataManager) -> Inference | None:
    """Slurm could not launch a step on some nodes, and says why: nothing of the script ran there.

    A node is likely at fault where it alone of several refused for a reason of its own.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    lines = [note for note in (log.notes if log else ()) if _LAUNCH.search(note)]
    matches = [match for match in map(_LAUNCH.search, lines) if match]
    if not matches:
        return None
    job_nodes = end.nodes if end else ()
    nodes = tuple(
        dict.fromkeys(m["node"] for m in matches if not job_nodes or m["node"] in job_nodes)
    )
    refusal = next((r for r in _REFUSALS if r.pattern.search(matches[0]["why"])), None)
    if refusal is None or not nodes:
        return Inference(
            name="launch-failed",
            description=f"Slurm could not launch a step: {matches[0]['why']}",
            sureness=Sureness.LIKELY,
            nodes=nodes,
            evidence=tuple(lines[:MOST_LINES]),
            advice="read what slurmd says there; check the nodes before the next start",
        )
    at_fault = refusal.of_the_node and len(nodes) <= len(job_nodes) / 2
    leave = f"start again without {listed(nodes)} ({leaving_out(nodes, data)})"
    return Inference(
        name=refusal.name,
        description=refusal.means.format(nodes=listed(nodes)),
        attribution=Attribution.NODE if at_fault else Attribution.UNDECIDED,
        sureness=Sureness.LIKELY,
        nodes=nodes,
        evidence=tuple(lines[:MOST_LINES]),
        advice=refusal.advice.format(leave=leave, node=nodes[0]),
    )


def never_met(_: Inference, data: DataManager) -> Inference | None:
    """The ranks never met: their port was in use, or they were sent to a host without the job.

    A rendezvous that never formed is no connection that broke: the same again fails again.
    """
    log, end = data.get(TrainingLog), data.get(ScriptEnd)
    if log is None:
        return None
    errors = [failure.error for failure in log.failures if failure.error]
    if not errors or not all(map(_NEVER_MET.search, errors)):
        return None
    if bound := _first(_BIND, log.notes):
        return Inference(
            name="port-in-use",
            description=f"port {bound['port']}, where the ranks were to meet, was in use: another"
            " job or process on that node had it",
            attribution=Attribution.TRANSIENT,
            sureness=Sureness.LIKELY,
            evidence=(bound.string,),
            advice=f"choose the port by the job's number instead of {bound['port']}"
            " (MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))); `ss -tlnp` on the node shows who"
            " has it",
        )
    to = _first(_CONNECT, [*log.notes, *errors])
    nodes = end.nodes if end else ()
    if to and nodes and not _is_of_job(to["host"], nodes):
        return Inference(
            name="wrong-master-address",
            description=f"the ranks were told to meet at {to['host']}, which is no node of the"
            f" job ({listed(nodes)}), and never did",
            attribution=Attribution.USER,
            sureness=Sureness.LIKELY,
            evidence=(to.string,),
            advice="set MASTER_ADDR (--rdzv-endpoint) to a node of the job:"
            " $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1); if this is another name"
            " of one, check that it listens there",
        )
    where = f" at {to['host']}, port {to['port']}" if to else ""
    return Inference(
        name="rendezvous-never-formed",
        description=f"the ranks never met{where}: a rank did not start, listened elsewhere, or"
        " the way there is closed",
        sureness=Sureness.LIKELY,
        nodes=nodes_of(log.failures),
        evidence=tuple(failure.line for failure in log.failures[:MOST_LINES]),
        advice="check that every node starts its ranks with one address and port; the check before"
        " the script tests the connections of the nodes",
    )


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((match for match in map(pattern.search, lines) if match), None)


def _is_of_job(host: str, nodes: Sequence[str]) -> bool:
    """Tell whether a host is a node of the job, or may be: an address may be any node's."""
    name = host.strip("[]").removeprefix("::ffff:")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        short = name.partition(".")[0].lower()
        return short == "localhost" or short in {node.partition(".")[0].lower() for node in nodes}
    return True
