# SPDX-License-Identifier: Apache-2.0
"""Collector: how every node of the job is after a failure.

Each node looks at itself (`node_state`), started by one srun beside the steps that there are. The
batch host looks without it: it tells what it sees even where srun cannot start anything any more.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.text import LineBuffer, cut, one_line
from slurm_health.system.processes import (
    NOTHING,
    PIPE,
    Process,
    abandon_session,
    own_module,
    read_available,
    start_tied,
)
from slurm_health.system.slurm.command import clean_environ, step_argv
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    NodesTold,
    NodeTold,
    TrainingLog,
)
from slurm_health.training.framework import DataCollector, DataManager, NothingCollected
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.messages import MessageReader
from slurm_health.training.monitor.node_state import node_state

# Says who is asked: `nodes`, or the `batch-host` alone. Set by the supervisor, for `--collect`.
VARIABLE, BATCH_HOST = "SLURM_HEALTH_COLLECT", "batch-host"
# Of the seconds that a collector has: for srun, an interpreter on each node, and what it looks at.
ANSWER_S = 12.0
_MOST_BYTES = 12 << 20  # of all nodes together; a child's answer has a limit
_MOST_BYTES_OF_NODE, _LEAST_BYTES_OF_NODE = 256 << 10, 2 << 10
_UNKILLABLE_S = 0.5
_REASON_CHARACTERS = 160
_FLIGHT_RECORDER = "flight-recorder"
_OF_ANY = (
    "the dumps at torch's own path may be of another training: no watchdog of this one wrote that"
    " it left any (--flight-recorder=on keeps them apart)"
)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What nodes are asked about a job: `began_s` is when its script did."""

    job: str
    here: str
    others: tuple[str, ...]
    began_s: float
    directory: Path
    ended: bool


class EveryNode(DataCollector):
    """After a failure."""

    kind = "nodes"
    data = NodesTold

    def __init__(self, job: EndedJob) -> None:
        self._job = job

    def collect_data(self) -> NodesTold:
        """Ask all nodes at once.

        Raises:
            NothingCollected: this is no job of Slurm's.
        """
        job = self._job
        _need_a_job(job.environ)
        question = _Question(
            job=job.environ["SLURM_JOB_ID"],
            here=job.node,
            others=_others(job.end.nodes, job.node, job.environ),
            began_s=job.ended_s - job.duration_s,
            directory=job.directory,
            ended=True,
        )
        return _asked(question, job.environ, ANSWER_S)


def with_dumps(data: DataManager) -> DataManager:
    """Return the same, with the Flight Recorder dumps that other nodes have read.

    Without those at torch's own path, where all trainings of the user leave theirs, if no watchdog
    of this one wrote that it left any.
    """
    told, read = data.get(NodesTold), data.get(FlightRecords)
    found = {each.rank: each for node in (told.nodes if told else ()) for each in node.flights}
    found |= {each.rank: each for each in (read.records if read else ())}
    if not found:
        return data
    missing = {name: why for name, why in data.missing.items() if name != _FLIGHT_RECORDER}
    others = [each for each in data.all if not isinstance(each, FlightRecords)]
    log = data.get(TrainingLog)
    if log is None or not log.watchdogs:
        if all(each.unclaimed for each in found.values()):
            return DataManager(
                others, missing={**missing, _FLIGHT_RECORDER: _OF_ANY}, failed=data.failed
            )
        found = {rank: each for rank, each in found.items() if not each.unclaimed}
    records = FlightRecords(records=tuple(found[rank] for rank in sorted(found)))
    return DataManager([*others, records], missing=missing, failed=data.failed)


def _need_a_job(environ: Mapping[str, str]) -> None:
    if not environ.get("SLURM_JOB_ID"):
        raise NothingCollected("this is no job of Slurm's")


def _others(nodes: Sequence[str], here: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    if environ.get(VARIABLE) == BATCH_HOST:
        return ()
    return tuple(node for node in nodes if node != here)


def _asked(question: _Question, environ: Mapping[str, str], limit_s: float) -> NodesTold:
    until_s = time.monotonic() + limit_s
    asked = _Asked(question, environ) if question.others else None
    own = node_state(
        job=question.job,
        node=question.here,
        began_s=question.began_s,
        directory=question.directory,
        ended=question.ended,
    )
    if asked is None:
        return NodesTold(nodes=(own,))
    told = asked.told(until_s)
    silent = tuple(node for node in question.others if node not in told)
    return NodesTold(
        nodes=(own, *(told[node] for node in question.others if node in told)),
        silent=silent,
        why_silent=asked.why if silent else "",
    )


class _Asked:
    """One srun that has all other nodes tell; `why` is what it said of those that did not."""

    def __init__(self, question: _Question, environ: Mapping[str, str]) -> None:
        room = _MOST_BYTES // len(question.others)
        most_bytes = min(_MOST_BYTES_OF_NODE, max(_LEAST_BYTES_OF_NODE, room))
        command = own_module(
            "slurm_health.training.monitor.node_state",
            f"--job={question.job}",
            f"--began-s={question.began_s:.3f}",
            f"--directory={question.directory}",
            f"--most-bytes={most_bytes}",
            *(["--ended"] if question.ended else []),
        )
        # It overlaps with the script's steps in their devices too: NVML shows it what they have.
        argv = step_argv(int(question.job), question.others, [], command)
        self.why = ""
        self._process: Process | None = None
        try:
            self._process = start_tied(
                argv,
                environ=clean_environ(environ),
                stdin=NOTHING,
                stdout=PIPE,
                stderr=PIPE,
                signal_mask=(),
            )
        except OSError as err:
            self.why = f"srun cannot be started: {err.strerror}"

    def told(self, until_s: float) -> dict[str, NodeTold]:
        """Return what nodes tell until then, by name."""
        found: dict[str, NodeTold] = {}
        if self._process is None:
            return found
        lines, reader = LineBuffer(), MessageReader[NodeTold](JsonDecoder(NodeTold))
        try:
            for data in _pieces(self._process, until_s):
                for line in lines.feed(data):
                    if (each := reader.take(line)) is not None:
                        found[each.node] = each
            said = read_available(self._process.stderr).decode(errors="replace")
        finally:
            abandon_session(self._process, wait_s=_UNKILLABLE_S)
        last = [line for line in said.splitlines() if line.startswith("srun: error: ")]
        self.why = cut(one_line(last[0]), _REASON_CHARACTERS) if last else "no answer in time"
        return found


def _pieces(process: Process, until_s: float) -> Iterator[bytes]:
    """Yield what a process writes until it ends, or until then."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    while (left_s := until_s - time.monotonic()) > 0:
        ready, _, _ = select.select([pipe], [], [], left_s)
        if ready:
            data = os.read(pipe, 1 << 20)
            if not data:
                return
            yield data
