# SPDX-License-Identifier: Apache-2.0
"""Why a job failed, by its files on any machine: output, kernel logs, dumps, NCCL's RAS.

The same operators decide as in a post-mortem. The state of the reading machine does not matter.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import msgspec

from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    KINDS,
    OUT_OF_MEMORY,
    of_line,
    without_stamp,
)
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import UsageError
from slurm_health.records.script_records import (
    MOST_LINES,
    NO_PROGRESS,
    SCRIPT_FAILED,
    Attribution,
    Diagnosed,
)
from slurm_health.system import killable
from slurm_health.training.diagnosis.collected import (
    UNKNOWN_CODE,
    FlightRecords,
    NodeState,
    NodeStates,
    ScriptEnd,
)
from slurm_health.training.diagnosis.collectives import FlightRecord
from slurm_health.training.diagnosis.failure import (
    FailureDiagnostician,
    JobAtFailure,
    what_follows,
)
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.diagnosis.ras import RasStatus, read_report
from slurm_health.training.diagnosis.samples import Standstill
from slurm_health.training.framework import DataManager
from slurm_health.training.monitor.flight_dumps import latest, read_dump
from slurm_health.training.monitor.job_collectors import JOB_TAIL_BYTES, tail

_MOST_FILES = 8192
_KEPT_OPERATIONS = 8  # of a group of a rank
_MOST_KERNEL_LINES = 10_000
_RANK_AT_THE_END = re.compile(r"(\d{1,5})$")
_RAS = re.compile(r"^NCCL version \S+ compiled with", re.MULTILINE)
_KERNEL = re.compile("|".join((ANY_XID, OUT_OF_MEMORY, r"^NVRM: ", *(k.pattern for k in KINDS))))
_HOST = re.compile(r"^\S{3,40}(?: {1,2}\d{1,2} [\d:]{8})? (?P<host>[A-Za-z0-9][\w.-]*) kernel: ")
_SHARE_OF_KERNEL = 0.5  # of a file's first lines: then it is a kernel's log
_HEAD_LINES = 200
_HEAD_CHARACTERS = 4096
_SHARE_OF_NO_TEXT = 0.3  # of characters that no text has


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `slurm-health explain FILE --json`.

    Args:
        cause: the name of the cause.
        blame: node, transient, user, outside or undecided.
        confidence: possible, likely or certain.
        nodes: the nodes of the cause, without blame.
        accused: the nodes at fault.
        ranks: the ranks of the cause.
        says: the cause in a sentence.
        evidence: its lines.
        advice: what helps.
        action: that of a job after it: restart, check, leave, stop or none.
    """

    cause: str
    blame: str
    confidence: str
    nodes: list[str]
    accused: list[str]
    ranks: list[int]
    says: str
    evidence: list[str]
    advice: str
    action: str


_BLAME = {
    Attribution.NODE: "node",
    Attribution.TRANSIENT: "transient",
    Attribution.USER: "user",
    Attribution.OUTSIDE: "outside",
    Attribution.UNDECIDED: "undecided",
}


class _CallStack(msgspec.Struct):
    py_callstack: str


class _Message(msgspec.Struct):
    extra: _CallStack = msgspec.field(name="extraInfo")


class _ErrorFile(msgspec.Struct):
    """The file of torchrun's `record` with an exception (`error.json`)."""

    message: _Message


class UnreadableInput(UsageError):
    """A named file cannot be read; the text has the file and the reason."""


@dataclass
class _Inputs:
    """The content of the files, by kind."""

    outputs: list[tuple[str, str]] = field(default_factory=list)
    kernel: dict[str, list[str]] = field(default_factory=dict)
    flights: dict[int, FlightRecord] = field(default_factory=dict)
    ras: RasStatus | None = None


def explain(
    paths: Sequence[Path], *, nodes: Sequence[str] = (), exit_code: int | None = None
) -> tuple[Diagnosed, Explanation]:
    """Return why a job failed, and the action after it.

    Args:
        paths: files and directories, in any order.
        nodes: those of the job; without them, those in the output.
        exit_code: of its script; without it, an unknown one of a failure.

    Raises:
        UnreadableInput: a file cannot be read, or all are empty.
    """
    inputs = _read(paths, nodes)
    log = read_output(inputs.outputs, shared=len(inputs.outputs))
    named = {failure.node for failure in log.failures} | {fact.node for fact in log.facts}
    known = tuple(nodes) or tuple(sorted((named | inputs.kernel.keys()) - {""}))
    data: list[msgspec.Struct] = [
        ScriptEnd(exit_code=UNKNOWN_CODE if exit_code is None else exit_code, nodes=known)
    ]
    if inputs.outputs:
        data.append(log)
    if inputs.kernel:
        reports = (
            NodeState(
                node=node, kernel=tuple(lines), unavailable={"memory kills": "a kernel's log"}
            )
            for node, lines in sorted(inputs.kernel.items())
        )
        data.append(NodeStates(nodes=tuple(reports)))
    if inputs.flights:
        records = tuple(record for _, record in sorted(inputs.flights.items()))
        data.append(FlightRecords(records=records))
    if inputs.ras is not None:
        data.append(inputs.ras)
    if inputs.ras is not None and not inputs.outputs:  # the report of a training that hangs
        data.append(Standstill(stalled_s=1.0, allowance_s=0.0, step=0, nodes=known))
        cause = HangDiagnostician().diagnose(data_manager=DataManager(data)).diagnosed
        if cause is not None and cause.cause == NO_PROGRESS:
            words = "nothing in these files shows where the training hangs"
            cause = msgspec.structs.replace(cause, description=words, evidence=[])
        action = what_follows(cause, JobAtFailure(batch_node="", nodes=known))
    else:
        data.append(JobAtFailure(batch_node=known[0] if known else "", nodes=known))
        manager = DataManager(data)
        action = FailureDiagnostician().diagnose(data_manager=manager)
        cause = manager.get(Diagnosed)
    if cause is None:
        cause = Diagnosed(
            cause="nothing-failed",
            description="the script ended with exit code 0",
            attribution=Attribution.UNDECIDED.value,
            sureness="certain",
        )
    elif exit_code is None and cause.cause == SCRIPT_FAILED:
        cause = _of_kernel_alone(cause, inputs.kernel)
    return cause, Explanation(
        cause=cause.cause,
        blame=_BLAME[Attribution(cause.attribution)],
        confidence=cause.sureness,
        nodes=cause.nodes,
        accused=cause.accused,
        ranks=cause.ranks,
        says=cause.description,
        evidence=cause.evidence,
        advice=cause.advice,
        action="none" if exit_code == 0 else action.kind,
    )


def _of_kernel_alone(cause: Diagnosed, kernel: Mapping[str, Sequence[str]]) -> Diagnosed:
    """Return what the kernels report if nothing says why the script failed: it need not be why."""
    reports = [
        (n, line, error) for n, of in kernel.items() for line in of if (error := of_line(line))
    ]
    if not reports:
        words = "nothing in these files says why the script failed"
        return msgspec.structs.replace(cause, description=words)
    node, _, error = reports[-1]
    return msgspec.structs.replace(
        cause,
        description=f"the kernel of {node} reports {error.name} (of {error.whose}): {error.what};"
        " that need not be why the script failed",
        nodes=[node],
        evidence=[f"{n}: {line}" for n, line, _ in reports[-MOST_LINES:]],
        advice=error.helps,
    )


def _read(paths: Sequence[Path], nodes: Sequence[str]) -> _Inputs:
    inputs = _Inputs()
    for path in _files(paths):
        named = path in paths
        try:
            text = dedent(tail(path, JOB_TAIL_BYTES))  # as a ticket or a chat quotes it
            with path.open("rb") as file:  # a plain file, or `tail` had raised
                may_be_dump = file.read(1) in {b"\x80", b"{"}
        except OSError as err:
            if named:
                raise UnreadableInput(f"{path} cannot be read: {err.strerror or err}") from err
            continue
        if may_be_dump and _read_flight(path, inputs):
            continue
        head = text[:_HEAD_CHARACTERS]
        if head.count("\ufffd") + head.count("\0") > len(head) * _SHARE_OF_NO_TEXT:
            if named:  # a directory may hold anything
                raise UnreadableInput(f"{path} is no text, and no dump that can be read")
            continue
        with contextlib.suppress(msgspec.MsgspecError):  # it is no error file of torchrun's
            text = from_json(text, _ErrorFile).message.extra.py_callstack or text
        if _RAS.search(text[: 1 << 16]):
            inputs.ras = read_report(text)
            continue
        # A kernel's log is named for a node of the job, or of its only node, or after its file.
        words = re.split(r"[^\w-]+", path.name)
        owner = nodes[0] if len(nodes) == 1 else path.name.partition(".")[0]
        owner = next((node for node in nodes if node in words), owner)
        is_kernels = _is_kernel_log(text)
        for line in text.splitlines()[-_MOST_KERNEL_LINES:]:  # an output may quote some
            host, message = _HOST.match(line), without_stamp(line)
            is_known = _KERNEL.search(message)
            if is_known or is_kernels:
                node = host["host"].partition(".")[0] if host else owner
                inputs.kernel.setdefault(node, []).extend([message[:2000]] if is_known else [])
        if text.strip() and not is_kernels:
            inputs.outputs.append((str(path), text))
    if not (inputs.outputs or inputs.kernel or inputs.flights or inputs.ras):
        raise UnreadableInput("there is nothing to read in " + ", ".join(map(str, paths)))
    return inputs


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    count = 0
    for path in paths:
        inside: Iterable[Path] = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in inside:
            if path.is_dir() and (not file.is_file() or file.is_symlink()):
                continue
            count += 1
            if count > _MOST_FILES:
                raise UnreadableInput(f"more than {_MOST_FILES} files: name fewer")
            yield file


def _read_flight(path: Path, inputs: _Inputs) -> bool:
    """Read a dump of the Flight Recorder; return whether it is one."""
    number = _RANK_AT_THE_END.search(
        path.stem if path.suffix in {".json", ".pickle"} else path.name
    )
    rank = int(number[1]) if number else len(inputs.flights)

    def work() -> bytes:
        return msgspec.json.encode(
            read_dump(path, rank, lambda all_: latest(all_, _KEPT_OPERATIONS))
        )

    answer = killable.run_one(work, 10.0)
    if not isinstance(answer, killable.Answered):
        return False
    inputs.flights[rank] = from_json(answer.data, FlightRecord)
    return True


def _is_kernel_log(text: str) -> bool:
    """Return whether most lines are the kernel's; a job's output may quote some."""
    lines = [line for line in text.splitlines()[:_HEAD_LINES] if line.strip()]
    kernels = sum(
        bool(_HOST.match(line) or _KERNEL.search(without_stamp(line)) or line.startswith("["))
        and not line.startswith("[rank")
        for line in lines
    )
    real = any(_HOST.match(line) or _KERNEL.search(without_stamp(line)) for line in lines)
    return real and kernels >= _SHARE_OF_KERNEL * len(lines)
