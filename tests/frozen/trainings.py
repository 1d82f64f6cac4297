# SPDX-License-Identifier: Apache-2.0
"""What is said of trainings that failed, hang or are slow: by recordings, logs and standstills.

`inputs/diagnoses.jsonl` holds what was collected of each of some hundred, one a line. A recording
in tests/data/played_training has

output.txt     what ranks wrote and how they ended, as `srun --label` has it, without C++'s frames
fr/rank_N      the Flight Recorder's dump of each rank that left one
monitor.jsonl  what the agents of both nodes sent while it hung, in order
nvml.jsonl     what NVML says of each node's GPUs: while it hung, or else once it had ended
stack_N.txt    where the main thread of a rank was while it hung, by py-spy, with the frames of C++
kernel.txt     what the second node's kernel logged, where the fault is one that it logs
run.json       the cause, how each rank ended, the versions
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.checks.gpu import Gpu
from slurm_health.node.rules.finding import Status
from slurm_health.records.script_records import Diagnosed
from slurm_health.system.nvml import Gpus
from slurm_health.training.diagnosis.collected import (
    FlightRecords,
    MonitorReport,
    NodeState,
    NodeStates,
    ScriptEnd,
    SlurmView,
    TrainingLog,
)
from slurm_health.training.diagnosis.diagnostician import CauseDiagnostician
from slurm_health.training.diagnosis.failure import observe_failure
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.output import facts_of, read_output
from slurm_health.training.diagnosis.pace import PaceFinding, observe_pace
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport, Standstill
from slurm_health.training.framework import DataManager, Diagnostician, NothingCollected
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps

DATA = Path(__file__).parents[1] / "data"
DIAGNOSES = Path(__file__).parent / "inputs" / "diagnoses.jsonl"
NODES = ("n1", "n2")
# Long after the last step: recordings are made with less patience than the monitor has.
_STALLED_S = 600.0
_LATER_S = 100 * 365 * 86400.0
_OBSERVED = {"failure": observe_failure, "pace": observe_pace}
_KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        FlightRecords,
        MonitorReport,
        NodeStates,
        PaceFinding,
        ScriptEnd,
        SlurmView,
        Standstill,
        TrainingLog,
    )
}
_REPORT = msgspec.json.Decoder(NodeReport)


class _GpusThen(msgspec.Struct, frozen=True, kw_only=True):
    """Of a line of a recording's `nvml.jsonl`, what the check of GPUs goes by."""

    node: str
    gpus: Gpus


def recordings() -> Iterator[tuple[str, object]]:
    """Yield what post-mortem, monitor and the check of GPUs say of each recording."""
    for directory in sorted(each for each in (DATA / "played_training").iterdir() if each.is_dir()):
        facts = json.loads((directory / "run.json").read_text())
        output = (directory / "output.txt").read_text()
        yield f"{directory.name}: post-mortem", _post_mortem(directory, facts, output)
        lines = (directory / "monitor.jsonl").read_text().splitlines()
        reports = [_REPORT.decode(line) for line in lines]
        if reports:
            yield f"{directory.name}: monitor", _monitor(reports, output)
        yield f"{directory.name}: check of GPUs", _check_of_gpus(directory / "nvml.jsonl")


def failures() -> Iterator[tuple[str, object]]:
    """Yield what is said of failed scripts, by their logs, what nodes told and what was slow."""
    for path in sorted((DATA / "diagnosis").glob("*.txt")):
        end = ScriptEnd(exit_code=1, nodes=("n1", "n2", "n3"), script="train.sh")
        yield path.name, _inferred("failure", [end, read_output([("out", path.read_text())])])
    yield from _diagnoses({"failure", "pace"})


def standstills() -> Iterator[tuple[str, object]]:
    """Yield what is said of trainings that hang, by their ranks' stacks and flight records."""
    yield from _diagnoses({"hang"})


def _diagnoses(observed: set[str]) -> Iterator[tuple[str, object]]:
    for line in DIAGNOSES.read_text().splitlines():
        case = json.loads(line)
        if case["observed"] in observed:
            data = [read(kind, told) for kind, told in case["data"]]
            yield case["name"], _inferred(case["observed"], data)


def read(kind: str, told: Any) -> msgspec.Struct:
    """Return an item of what was collected, as a line of a file has it."""
    if kind == "log":
        return read_output([(name, text) for name, text in told])
    if "notes" in told:  # its lines of the system, as they stood in the output
        lines = enumerate(told["notes"])
        told["facts"] = [fact for order, line in lines for fact in facts_of(line, order)]
    return msgspec.convert(told, _KINDS[kind])


def _inferred(observed: str, data: list[msgspec.Struct]) -> object:
    return concluded(diagnosed(observed, data))


def diagnosed(observed: str, data: list[msgspec.Struct]) -> Diagnosed | None:
    """Return what is said of a failure, a hang or a pace by what was collected of it."""
    diagnostician: Diagnostician = HangDiagnostician()
    if observed != "hang":
        diagnostician = CauseDiagnostician(_OBSERVED[observed], OPERATORS)
    return diagnostician.diagnose(data_manager=DataManager(data)).diagnosed


def concluded(found: Diagnosed | None) -> object:
    """Return what counts of a conclusion: the cause, whose it is, where, and who is accused."""
    if found is None:
        return None
    return {
        "cause": found.cause,
        "whose": found.attribution,
        "sureness": found.sureness,
        "ranks": found.ranks,
        "nodes": found.nodes,
        "accused": found.accused,
    }


def _post_mortem(directory: Path, facts: Mapping[str, Any], output: str) -> object:
    codes = facts["ends"].values()
    worst = min(codes)
    end = ScriptEnd(
        exit_code=128 - worst if worst < 0 else max(codes), nodes=NODES, script="train.sh"
    )
    data: list[msgspec.Struct] = [end, read_output([("output.txt", output)])]
    job = EndedJob(
        end=end,
        environ={"TORCH_FR_DUMP_TEMP_FILE": str(directory / "fr" / "rank_")},
        node=NODES[0],
        directory=directory,
        ended_s=_LATER_S,
        duration_s=_LATER_S,
    )
    dumps = FlightDumps(job)
    if dumps.files():
        try:
            data.append(dumps.collect_data())
        except NothingCollected:
            return "its dumps are not read"
    kernel = directory / "kernel.txt"
    if kernel.exists():
        told = NodeState(node=NODES[-1], kernel=tuple(kernel.read_text().splitlines()))
        data.append(NodeStates(nodes=(told,)))
    return _inferred("failure", data)


def _monitor(reports: list[NodeReport], output: str) -> object:
    pulse = Pulse(NODES)
    for report in reports:
        pulse.observe(report, 0.0)
    for number, line in enumerate(output.splitlines()):
        pulse.read("output.txt", f"{line}\n", float(number) / 10)
    found: list[object] = []
    for program in pulse.programs.values():
        standstill = pulse.judge(program, {r.node: r for r in reports}, _STALLED_S)
        if standstill.why_not:
            found.append("no hang so far")
            continue
        records = tuple(rank.flight for rank in standstill.ranks if rank.flight)
        flights = [FlightRecords(records=records)] if records else []
        found.append(_inferred("hang", [standstill, *flights]))
    return found


def _check_of_gpus(path: Path) -> object:
    lines = path.read_text().splitlines() if path.exists() else []
    told = [msgspec.json.decode(line, type=_GpusThen) for line in lines]
    findings = {each.node: Gpu().judge(each.gpus) for each in told}
    return {
        node: [finding.status.value, finding.remedy.value if finding.remedy else None]
        for node, finding in findings.items()
        if finding.status is not Status.PASS
    }
