# SPDX-License-Identifier: Apache-2.0
"""What is kept of a run, without names of the machine it was played on; and how it is read.

output.txt     what ranks wrote and how they ended, as `srun --label` has it, without C++'s frames
fr/rank_N      the Flight Recorder's dump of each rank that left one
monitor.jsonl  what the monitors of both nodes told while it hung, in order
nvml.jsonl     what NVML told of each node's GPUs: while it hung, or else once it had ended
stack_N.txt    where the main thread of a rank was while it hung, by py-spy, with the frames of C++
kernel.txt     what the second node's kernel said, where the fault is one that it tells of
run.json       the cause, how each rank ended, the versions
"""

from __future__ import annotations

import io
import json
import pickle
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.played_training.causes import BY_NAME, RANKS_PER_NODE, Cause
from benchmarks.played_training.gpus import GpusNow
from benchmarks.played_training.perform import ROOT, Seen
from slurm_health.training.monitor.messages import NodeLook, NodeMessage, NodeNow
from tests.played_gpu import kernel_log
from tests.played_gpu.description import machine

DUMPS = "fr/rank_"
_FRAME = re.compile(r"\d+: frame #\d+: ")
_SCRIPT_HOME, _VENV = "/home/alice/training", "/opt/venv"
_GPUS = msgspec.json.Decoder(GpusNow)
_MESSAGE: msgspec.json.Decoder[NodeMessage] = msgspec.json.Decoder(NodeNow | NodeLook)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording as it was read."""

    cause: Cause
    directory: Path
    output: str
    kernel: tuple[str, ...]
    ends: Mapping[int, int]
    messages: tuple[NodeMessage, ...]
    gpus: tuple[GpusNow, ...]


def keep(seen: Seen, cause: Cause, python: str, directory: Path) -> None:
    """Write the recording of a run into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    rename = _renaming(python)
    lines = [line for line in seen.lines if not _FRAME.match(line)]
    (directory / "output.txt").write_text(rename("\n".join(lines) + "\n"))
    dumps = directory / DUMPS
    dumps.parent.mkdir(exist_ok=True)
    for old in dumps.parent.iterdir():
        old.unlink()
    for rank, dump in seen.dumps.items():
        (dumps.parent / f"{dumps.name}{rank}").write_bytes(_renamed_dump(dump, rename))
    told = [rename(msgspec.json.encode(_anonymous(each)).decode()) for each in seen.messages]
    (directory / "monitor.jsonl").write_text("".join(f"{line}\n" for line in told))
    if cause.device_fault and cause.is_told:
        device = machine(RANKS_PER_NODE).devices[cause.device_fault.device]
        said = kernel_log.said(device, cause.device_fault)
        (directory / "kernel.txt").write_text("".join(f"{line}\n" for line in said))
    for rank, stack in sorted(seen.stacks.items()):
        (directory / f"stack_{rank}.txt").write_text(rename(stack))
    told = [msgspec.json.encode(each).decode() for each in seen.gpus]
    (directory / "nvml.jsonl").write_text("".join(f"{line}\n" for line in told))
    facts = {
        "cause": cause.name,
        "ends": {str(rank): code for rank, code in sorted(seen.ends.items())},
        "ran_s": round(seen.ran_s, 1),
        "torch": _printed(python, "import importlib.metadata as m; print(m.version('torch'))"),
    }
    (directory / "run.json").write_text(json.dumps(facts, indent=2) + "\n")


def read(directory: Path) -> Recording:
    """Return a recording.

    Raises:
        OSError: a file of it is not there.
        ValueError: a file of it is something else.
    """
    facts = json.loads((directory / "run.json").read_text())
    lines = (directory / "monitor.jsonl").read_text().splitlines()
    kernel, gpus = directory / "kernel.txt", directory / "nvml.jsonl"
    return Recording(
        cause=BY_NAME[facts["cause"]],
        directory=directory.resolve(),
        output=(directory / "output.txt").read_text(),
        kernel=tuple(kernel.read_text().splitlines()) if kernel.exists() else (),
        ends={int(rank): code for rank, code in facts["ends"].items()},
        messages=tuple(_MESSAGE.decode(line) for line in lines),
        gpus=tuple(_GPUS.decode(line) for line in gpus.read_text().splitlines()),
    )


def _renaming(python: str) -> Callable[[str], str]:
    """Return what replaces this machine's directories by those of a user somewhere."""
    pairs = [
        (str(Path(python).absolute().parent.parent), _VENV),
        (_printed(python, "import sys; print(sys.base_prefix)"), "/usr"),
        (f"{ROOT}/benchmarks/played_training", _SCRIPT_HOME),
        (str(ROOT), _SCRIPT_HOME),
    ]

    def rename(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    return rename


def _renamed_dump(dump: bytes, rename: Callable[[str], str]) -> bytes:
    """Return a dump whose frames have other directories; what is said twice is written once."""
    known: dict[str, str] = {}

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return known.setdefault(value, rename(value))
        if isinstance(value, dict):
            return {renamed(key): renamed(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(renamed(each) for each in value)
        return value

    out = io.BytesIO()
    pickle.Pickler(out, protocol=2).dump(renamed(pickle.loads(dump)))
    return out.getvalue()


def _anonymous(message: NodeMessage) -> NodeMessage:
    """Return a message without addresses: both nodes are this machine."""
    if isinstance(message, NodeNow):
        return message
    return msgspec.structs.replace(message, addresses=(), broken=(), sent={})


def _printed(python: str, program: str) -> str:
    argv = [python, "-c", program]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
