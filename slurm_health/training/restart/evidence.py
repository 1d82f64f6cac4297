# SPDX-License-Identifier: Apache-2.0
"""What Slurm and the journal know of a failed script: read, and nothing decided."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.preflight.decide.after_failure import Failure, Next
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.errors import SlurmError
from slurm_health.records.records import Action, ActionIntended, RunStarted, VerdictReached
from slurm_health.records.script_records import (
    Diagnosed,
    FailurePlanned,
    HangFound,
    ScriptStarted,
)
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client

_RUNS = frozenset({"RUNNING"})


@dataclass(frozen=True, kw_only=True)
class FailedScript:
    """What the supervisor tells of the script that has failed.

    Args:
        directory: of the run in the journal that the script belongs to.
        restart: which restart it would be, from 1 on.
        max_restarts: how many its user allows.
        batch_node: where the supervisor runs.
        nodes: the nodes that it ran on; all that Slurm gave the job where it names none.
        spares: those that the job kept beside them.
    """

    directory: Path
    restart: int
    max_restarts: int
    batch_node: str = ""
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()


def failure_of(failed: FailedScript, job: str, client: Client, policy: Policy) -> Failure:
    """Return all that a decision about a failed script rests on.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: the journal cannot be read.
    """
    shown = client.job(job)
    all_nodes = (*failed.nodes, *failed.spares)
    gone = [node for node in all_nodes if node not in shown.nodes]
    over = "" if shown.states <= _RUNS else "+".join(sorted(shown.states))
    least = None
    if policy.nodes_wanted is not None:
        least = policy.nodes_wanted if policy.nodes_needed is None else policy.nodes_needed
    hangs = _hangs(failed.directory)
    return Failure(
        diagnosed=_diagnosed(failed.directory),
        job_over=over,
        batch_node=failed.batch_node or failed.nodes[0],
        nodes=failed.nodes,
        spares=failed.spares,
        lost=_lost(gone, client) if gone and not over else (),
        restarted_unchecked=_restarted_unchecked(failed.directory),
        least=least,
        hang=hangs[-1],
        hangs_before=tuple(filter(None, hangs[:-1])),
    )


def check_took_s(directory: Path) -> float | None:
    """Return how long the check in a run's directory took, None where it came to no verdict.

    Raises:
        JournalError: the journal cannot be read.
    """
    began_s: float | None = None
    for entry in journal.read_all(directory, journal.MASTER):  # all was written by one clock
        match entry.record:
            case RunStarted() if began_s is None:
                began_s = entry.time_s
            case VerdictReached() if began_s is not None:
                return entry.time_s - began_s
            case _:
                pass
    return None


def _lost(gone: Sequence[str], client: Client) -> tuple[tuple[str, str], ...]:
    """Return what Slurm says of nodes that it took out of the job: no other job has."""
    states: Mapping[str, str] = {}
    with contextlib.suppress(SlurmError):  # that they are gone is enough
        states = {name: node.state for name, node in client.nodes(gone).items()}
    return tuple(
        (node, f"Slurm took {node} out of the job; it is {states.get(node, 'in a state unknown')}")
        for node in gone
    )


def _diagnosed(directory: Path) -> Diagnosed | None:
    """Return what the post-mortem of the last start of the script found, None without one."""
    started = [
        entry.time_s
        for entry in journal.read_all(directory, journal.SUPERVISOR)
        if isinstance(entry.record, ScriptStarted)
    ]
    found = [
        entry
        for entry in journal.read_all(directory, journal.POST_MORTEM)
        if isinstance(entry.record, Diagnosed)
    ]
    # Both were written on this node, by one clock.
    if not found or (started and found[-1].time_s < started[-1]):
        return None
    record = found[-1].record
    assert isinstance(record, Diagnosed)
    return record


def _hangs(directory: Path) -> list[HangFound | None]:
    """Return for each start of the script the hang for which it was ended; this one is the last.

    All was written on this node, by one clock.
    """
    of_writers = (
        journal.read_all(directory, each) for each in (journal.SUPERVISOR, journal.MONITOR)
    )
    entries = sorted(itertools.chain(*of_writers), key=lambda entry: entry.time_s)
    hangs: list[HangFound | None] = [None]
    latest: HangFound | None = None
    for entry in entries:
        match entry.record:
            case ScriptStarted(restart=restart) if restart:
                hangs.append(None)
            case HangFound() as latest:
                pass
            case ActionIntended(action=Action.END_SCRIPT):
                hangs[-1] = latest
    return hangs


def _restarted_unchecked(directory: Path) -> bool:
    return any(
        isinstance(entry.record, FailurePlanned) and entry.record.plan == Next.RESTART
        for entry in journal.read_all(directory, journal.RESTART)
    )
