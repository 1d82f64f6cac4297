# SPDX-License-Identifier: Apache-2.0
"""What has the script's PyTorch leave its flight record in the journal, if that answers."""

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
    """Return the variables to set for a script of this environment, to which the journal belongs.

    A journal that cannot be read, or does not answer in time, costs the script its flight record
    and nothing else; that is said.
    """
    if not directory:
        return {}
    try:
        looked = run_one(lambda: _look_at(Path(directory)), limit_s)
    except OSError as err:
        looked = Broke(f"no process can be started to read it: {err}", 0.0)
    match looked:
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


def _look_at(directory: Path) -> bytes:
    """Be the child: say which torch the probes ran with, and whether there can be named pipes."""
    return msgspec.msgpack.encode((_torch_of_check(directory), _takes_pipes(directory)))


def _takes_pipes(directory: Path) -> bool:
    """Tell whether the filesystem of a directory has named pipes."""
    pipe = directory / ".flight-rank.pipe"
    try:
        os.mkfifo(pipe, 0o600)
        pipe.unlink()
    except OSError:
        return False
    return True


def _torch_of_check(directory: Path) -> str:
    """Return the version of torch that the probes ran with, empty where the journal has none."""
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            if b'"workers_ready"' in line:
                with contextlib.suppress(msgspec.DecodeError):
                    return str(from_json(line, dict[str, object]).get("torch", ""))
    return ""
