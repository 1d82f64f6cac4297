# SPDX-License-Identifier: Apache-2.0
"""The recordings in tests/data/played_training, and what the product says of them.

output.txt     what ranks wrote and how they ended, as `srun --label` has it, without C++'s frames
fr/rank_N      the Flight Recorder's dump of each rank that left one
monitor.jsonl  what the agents of both nodes sent while it hung, in order
nvml.jsonl     what NVML says of each node's GPUs: while it hung, or else once it had ended
stack_N.txt    where the main thread of a rank was while it hung, by py-spy, with the frames of C++
kernel.txt     what the second node's kernel logged, where the fault is one that it logs
run.json       the cause, how each rank ended, the versions
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.node.checks.gpu import Gpu
from slurm_health.node.rules.finding import Status
from slurm_health.records.gpu_load import DeviceSample
from slurm_health.records.script_records import Diagnosed
from slurm_health.system.nvml import Gpus
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    NodeState,
    NodeStates,
    ScriptEnd,
)
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport
from slurm_health.training.framework import DataManager
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.gpu_activity import GpuActivity

DATA = Path(__file__).parents[1] / "data" / "played_training"
RECORDED = sorted(directory.name for directory in DATA.iterdir() if directory.is_dir())
NODES = ("n1", "n2")  # two ranks each
_DUMPS = "fr/rank_"
_STALLED_S = 600.0  # well past the monitor's limit, which is longer than a recording
_LATE_S = 100 * 365 * 86400.0  # after every dump, so that none counts as another job's


class GpusNow(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a node at one moment; `hangs`: ranks waited for each other then."""

    node: str = ""
    hangs: bool = False
    gpus: Gpus
    samples: tuple[DeviceSample, ...]
    activity: GpuActivity


_GPUS = msgspec.json.Decoder(GpusNow)
_REPORT = msgspec.json.Decoder(NodeReport)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording as it was read."""

    directory: Path
    output: str
    kernel: tuple[str, ...]
    ends: Mapping[int, int]
    messages: tuple[NodeReport, ...]
    gpus: tuple[GpusNow, ...]


def recording(name: str) -> Recording:
    """Read a recording of `RECORDED`."""
    directory = DATA / name
    kernel = directory / "kernel.txt"
    ends = json.loads((directory / "run.json").read_text())["ends"]
    return Recording(
        directory=directory,
        output=(directory / "output.txt").read_text(),
        kernel=tuple(kernel.read_text().splitlines()) if kernel.exists() else (),
        ends={int(rank): code for rank, code in ends.items()},
        messages=tuple(map(_REPORT.decode, _lines(directory / "monitor.jsonl"))),
        gpus=tuple(map(_GPUS.decode, _lines(directory / "nvml.jsonl"))),
    )


def post_mortem(recorded: Recording) -> Diagnosed | None:
    """Diagnose the ended script from its output, dumps and kernel log."""
    worst = min(recorded.ends.values())
    end = ScriptEnd(
        exit_code=128 - worst if worst < 0 else max(recorded.ends.values()),
        nodes=NODES,
        script="train.sh",
    )
    data: list[msgspec.Struct] = [end, read_output([("output.txt", recorded.output)])]
    job = EndedJob(
        end=end,
        environ={"TORCH_FR_DUMP_TEMP_FILE": str(recorded.directory / _DUMPS)},
        node=NODES[0],
        directory=recorded.directory,
        ended_s=_LATE_S,
        duration_s=_LATE_S,
    )
    dumps = FlightDumps(job)
    if dumps.files():
        data.append(dumps.collect_data())
    if recorded.kernel:
        data.append(NodeStates(nodes=(NodeState(node=NODES[-1], kernel=recorded.kernel),)))
    return FailureDiagnostician().diagnose(data_manager=DataManager(data)).diagnosed


def monitor(recorded: Recording) -> Diagnosed | str | None:
    """Diagnose the hang as the monitor does; a reason why it sees none, None without messages."""
    if not recorded.messages:
        return None
    pulse = Pulse(NODES)
    for report in recorded.messages:
        pulse.observe(report, 0.0)
    for number, line in enumerate(recorded.output.splitlines()):
        pulse.read("output.txt", f"{line}\n", float(number) / 10)
    reports = {report.node: report for report in recorded.messages}
    for program in pulse.programs.values():
        standstill = pulse.judge(program, reports, _STALLED_S)
        if standstill.why_not:
            return standstill.why_not
        records = tuple(rank.flight for rank in standstill.ranks if rank.flight)
        flights = [FlightRecords(records=records)] if records else []
        data = DataManager([standstill, *flights])
        return HangDiagnostician().diagnose(data_manager=data).diagnosed
    return "no rank was seen"


def gpu_findings(recorded: Recording) -> dict[str, str]:
    """Return what the nodes' check of GPUs finds, by node."""
    findings = {now.node: Gpu().judge(now.gpus) for now in recorded.gpus}
    return {node: f.text for node, f in findings.items() if f.status is not Status.PASS}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
