# SPDX-License-Identifier: Apache-2.0
"""Collector: the states of all nodes of the job after a failure.

An agent on every other node sends its state (`node_state`) unasked. The batch host reads its own
without an agent, even if srun can no longer start any.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import IO

from slurm_health.records.text import cut, one_line
from slurm_health.system.processes import Process
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    NodeStates,
    TrainingLog,
)
from slurm_health.training.framework import DataCollector, DataManager, NothingCollected
from slurm_health.training.monitor.agents import Agents, start_in_job
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.messages import STATE
from slurm_health.training.monitor.node_state import node_state
from slurm_health.training.monitor.ranks import Ranks

# Of a collector's time: for srun, the interpreters on all nodes, and their states.
ANSWER_S = 11.0
_MOST_BYTES = 12 << 20  # of all nodes together; a child's answer has a limit
_MOST_BYTES_OF_NODE, _LEAST_BYTES_OF_NODE = 256 << 10, 2 << 10
_REASON_CHARACTERS = 160
_FLIGHT_RECORDER = "flight-recorder"
_OF_ANY = (
    "the dumps at torch's own path may be of another training: no watchdog of this one reported a"
    " dump (--flight-recorder=on keeps them apart)"
)


class EveryNode(DataCollector):
    """The states of all nodes after a failure."""

    kind = "nodes"
    data = NodeStates

    def __init__(self, job: EndedJob) -> None:
        self._job = job

    def collect_data(self) -> NodeStates:
        """Ask all nodes at once.

        Raises:
            NothingCollected: this is no Slurm job.
        """
        job = self._job
        number = job.environ.get("SLURM_JOB_ID", "")
        if not number:
            raise NothingCollected("this is no Slurm job")
        others = [node for node in job.end.nodes if node != job.node]
        with tempfile.TemporaryFile() as errors:
            return self._asked(int(number), others, errors)

    def _asked(self, number: int, others: Sequence[str], errors: IO[bytes]) -> NodeStates:
        job, until_s = self._job, time.monotonic() + ANSWER_S
        began_s = job.ended_s - job.duration_s

        def start(nodes: Sequence[str]) -> Process:
            most_bytes = min(_MOST_BYTES_OF_NODE, _MOST_BYTES // len(nodes))
            options = (
                f"--began-s={began_s:.3f}",
                f"--directory={job.directory}",
                f"--most-bytes={max(_LEAST_BYTES_OF_NODE, most_bytes)}",
                "--ended",
            )
            return start_in_job(number, nodes, options, job.environ, stderr=errors.fileno())

        agents, why = Agents(start), "no answer in time"
        try:
            if others:
                agents.begin(others)
        except OSError as err:
            why = f"srun cannot be started: {err.strerror}"
        try:
            ranks = Ranks(str(number), job.node)
            own = node_state(str(number), job.node, began_s, job.directory, ranks)
            reports = agents.ask(STATE, others, until_s - time.monotonic()) if agents.nodes else {}
        finally:
            agents.end()
        states = {node: report.state for node, report in reports.items() if report.state}
        silent = tuple(node for node in others if node not in states)
        errors.seek(0)
        for line in errors.read().decode(errors="replace").splitlines():
            if line.startswith("srun: error: "):
                why = cut(one_line(line), _REASON_CHARACTERS)
                break
        return NodeStates(
            nodes=(own, *(states[node] for node in others if node in states)),
            silent=silent,
            why_silent=why if silent else "",
        )


def with_dumps(data: DataManager) -> DataManager:
    """Return the same data with the Flight Recorder dumps that other nodes have read.

    All trainings of the user share torch's own path: dumps there are left out if no watchdog of
    this one reported a dump.
    """
    states, own = data.get(NodeStates), data.get(FlightRecords)
    records = {
        record.rank: record for node in (states.nodes if states else ()) for record in node.flights
    }
    records |= {record.rank: record for record in (own.records if own else ())}
    if not records:
        return data
    missing = {name: why for name, why in data.missing.items() if name != _FLIGHT_RECORDER}
    others = [item for item in data.all if not isinstance(item, FlightRecords)]
    log = data.get(TrainingLog)
    if log is None or not log.watchdogs:
        records = {rank: record for rank, record in records.items() if not record.unclaimed}
        if not records:
            missing[_FLIGHT_RECORDER] = _OF_ANY
            return DataManager(others, missing=missing, failed=data.failed)
    flights = FlightRecords(records=tuple(records[rank] for rank in sorted(records)))
    return DataManager([*others, flights], missing=missing, failed=data.failed)
