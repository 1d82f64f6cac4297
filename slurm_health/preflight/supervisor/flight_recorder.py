# SPDX-License-Identifier: Apache-2.0
"""Variables that make the script's PyTorch dump its flight record into the journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slurm_health.preflight.supervisor import monitor_process
from slurm_health.preflight.supervisor.recorder import say
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.system.killable import Answered, Broke, Hung, run_one


def recording(environ: Mapping[str, str], directory: str, *, limit_s: float) -> dict[str, str]:
    """Return the variables to set for a script with this environment and journal.

    If the journal cannot be read, or does not answer in time, the script has no flight record, and
    a line says so.
    """
    if not directory:
        return {}
    try:
        result = run_one(lambda: _inspect(Path(directory)), limit_s)
    except OSError as err:
        result = Broke(f"no process can be started to read it: {err}", 0.0)
    match result:
        case Answered(data=data):
            torch, takes_pipes = from_msgpack(data, tuple[str, bool])
            new = monitor_process.flight_environ(environ, directory, torch)
            if not takes_pipes:  # a rank whose pipe cannot be made would end
                new.pop(monitor_process.PIPES, None)
            return new
        case Hung():
            why = f"its filesystem did not answer within {limit_s:g} s"
        case Broke(reason=reason):
            why = reason
    say(f"--flight-recorder: the script's PyTorch does not record: journal {directory}: {why}")
    return {}


def _inspect(directory: Path) -> bytes:
    """Return, from the child, the probes' version of torch, and whether there can be pipes."""
    pipe, takes_pipes = directory / ".flight-rank.pipe", True
    try:
        os.mkfifo(pipe, 0o600)
        pipe.unlink()
    except OSError:
        takes_pipes = False
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            if b'"workers_ready"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    torch = str(from_json(line, dict[str, object]).get("torch", ""))
                    return msgspec.msgpack.encode((torch, takes_pipes))
    return msgspec.msgpack.encode(("", takes_pipes))
