# SPDX-License-Identifier: Apache-2.0
"""What the product says of a recording by its own readers and judges, and whether rightly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from benchmarks.played_training.causes import Cause, Whose
from benchmarks.played_training.perform import NODES
from benchmarks.played_training.recording import DUMPS, Recording
from slurm_health.node.checks.gpu import Gpu, GpusSeen
from slurm_health.node.rules.finding import Status
from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.by_output import OutputProgress
from slurm_health.training.diagnosis.collected import Collected, NodesTold, NodeTold, ScriptEnd
from slurm_health.training.diagnosis.diagnostician import (
    Diagnostician,
    observe_failure,
    observe_hang,
)
from slurm_health.training.diagnosis.inference import Attribution, InferenceChain
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.rank_now import RankNow
from slurm_health.training.diagnosis.training_log import read_log
from slurm_health.training.diagnosis.watched import WatchedPrograms
from slurm_health.training.monitor.collector import EndedJob, NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.messages import NodeLook, NodeMessage, looked_at

# Names of inferences with which nothing is decided.
UNDECIDED = frozenset(
    {
        "script-failed",
        "no-progress",
        "rank-failed",
        "ranks-waited",
        "collective-timed-out",
        "connections-broke",
        "collectives-differ",
        "contradiction",
        "still-works",
    }
)
# Long after the last step: recordings are made with less patience than the monitor has.
_STALLED_S = 600.0
_WINDOW_S = 4.0
_YEAR_S = 365 * 86400.0


class Verdict(Enum):
    """Whether what was said is true."""

    RIGHT = "right"
    UNDECIDED = "undecided"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What was said, and what is to be thought of it."""

    verdict: Verdict
    found: Diagnosed | None
    why: str = ""  # it is wrong; of a check, what it says


def post_mortem(recording: Recording) -> Said:
    """Return what is said once the script has ended, from output, dumps and the kernel's lines."""
    worst = min(recording.ends.values())
    end = ScriptEnd(
        exit_code=128 - worst if worst < 0 else max(recording.ends.values()),
        nodes=NODES,
        script="train.sh",
    )
    data: list[msgspec.Struct] = [end, read_log([("output.txt", recording.output)])]
    job = EndedJob(
        end=end,
        environ={"TORCH_FR_DUMP_TEMP_FILE": str(recording.directory / DUMPS)},
        node=NODES[0],
        directory=recording.directory,
        ended_s=_YEAR_S * 100,
        duration_s=_YEAR_S * 100,
    )
    dumps = FlightDumps()
    if dumps.is_enabled(job):
        try:
            data.append(dumps.collect_data(job))
        except NothingCollected as err:
            return Said(verdict=Verdict.WRONG, found=None, why=f"the dumps cannot be read: {err}")
    if recording.kernel:
        data.append(NodesTold(nodes=(NodeTold(node=NODES[-1], kernel=recording.kernel),)))
    found = Diagnostician(observe_failure, InferenceChain(OPERATORS)).diagnose(Collected(data))
    return judge(recording.cause, found.diagnosed)


def monitor(recording: Recording) -> Said | None:
    """Return what the monitor says while it hangs; None where nothing hangs."""
    if not recording.messages:
        return None
    watched = WatchedPrograms(NODES)
    looks: dict[str, NodeLook] = {}
    for message in recording.messages:
        watched.hear(message.node, _ranks_of(message), 0.0)
        if isinstance(message, NodeLook):
            looks[message.node] = message
    looked = looked_at(looks, silent=())
    for program in watched.programs.values():
        if program.step:
            judged = watched.judge(program, looked, window_s=_WINDOW_S, now_s=_STALLED_S)
        else:  # no heartbeat: its output stands still
            output = OutputProgress()
            for number, line in enumerate(recording.output.splitlines()):
                output.take("output.txt", f"{line}\n", float(number) / 10)
            judged = output.judge(watched, looked, NODES, window_s=_WINDOW_S, now_s=_STALLED_S)
        if isinstance(judged, str):
            return Said(verdict=Verdict.UNDECIDED, found=None, why=f"no hang so far: {judged}")
        standstill, flights = judged
        chain = InferenceChain(OPERATORS)
        data = Collected([standstill, *([flights] if flights.records else [])])
        found = Diagnostician(observe_hang, chain).diagnose(data).diagnosed
        return judge(recording.cause, found)
    return Said(verdict=Verdict.UNDECIDED, found=None, why="no rank was seen")


def health_check(recording: Recording) -> Said | None:
    """Return what the nodes' check of GPUs says, None where it finds them well."""
    found = {
        each.node: finding
        for each in recording.gpus
        if (finding := Gpu().judge(GpusSeen(gpus=each.gpus))).status is not Status.PASS
    }
    if not found:
        return None
    why = "; ".join(f"{node}: {finding.text}" for node, finding in found.items())
    is_right = recording.cause.is_told and set(found) == set(recording.cause.nodes)
    return Said(verdict=Verdict.RIGHT if is_right else Verdict.WRONG, found=None, why=why)


def _ranks_of(message: NodeMessage) -> tuple[RankNow, ...]:
    return message.now if isinstance(message, NodeLook) else message.ranks


def judge(cause: Cause, found: Diagnosed | None) -> Said:
    """Hold what was said against what was done."""
    if found is None or found.cause in UNDECIDED - set(cause.named):
        return Said(verdict=Verdict.UNDECIDED, found=found)
    why = ""
    if found.cause not in cause.named:
        why = f"it is called {found.cause}"
    elif extra := sorted(set(found.ranks) - set(cause.ranks)):
        why = f"it was not rank {', '.join(map(str, extra))}"
    elif innocent := sorted(set(found.accused) - set(cause.nodes)):
        why = f"{', '.join(innocent)} is well"
    elif (found.attribution == Attribution.USER.value and cause.whose is not Whose.USER) or (
        found.attribution == Attribution.NODE.value and cause.whose is not Whose.NODE
    ):
        why = f"it is laid to the {found.attribution}"
    return Said(verdict=Verdict.WRONG if why else Verdict.RIGHT, found=found, why=why)
