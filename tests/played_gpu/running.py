# SPDX-License-Identifier: Apache-2.0
"""Programs that run on played GPUs, one process for each rank."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.played_gpu.description import VARIABLE

PROGRAMS = Path(__file__).parent / "programs"
# A run that is not slowed down takes seconds; the machine may be shared by many.
LONGEST_S = 240
CRASHED = "played CUDA: crashed"


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    output: str
    errors: str


def environment(gpus: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that sees the played GPUs of this file."""
    return {
        **os.environ,
        VARIABLE: str(gpus),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        # Where torch leaves dumps of its own accord: not in the home directory of who runs tests.
        "XDG_CACHE_HOME": str(gpus.parent / "cache"),
        **(variables or {}),
    }


def run(
    python: Path,
    program: str,
    arguments: Sequence[str] = (),
    *,
    gpus: Path,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    return start(python, program, arguments, gpus=gpus, variables=variables).ended()


@dataclass(frozen=True, kw_only=True)
class Started:
    process: subprocess.Popen[str]

    def ended(self) -> Ended:
        """Wait for its end; a crash of what is played fails the test under its own name."""
        try:
            output, errors = self.process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, errors = self.process.communicate()
            raise AssertionError(f"still running after {LONGEST_S} s: {output}{errors}") from None
        assert CRASHED not in errors, errors
        return Ended(status=self.process.returncode, output=output, errors=errors)


def start(
    python: Path,
    program: str,
    arguments: Sequence[str] = (),
    *,
    gpus: Path,
    variables: Mapping[str, str] | None = None,
) -> Started:
    process = subprocess.Popen(
        [python, PROGRAMS / f"{program}.py", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(gpus, variables),
    )
    return Started(process=process)


def start_ranks(
    python: Path,
    program: str,
    arguments: Sequence[str] = (),
    *,
    count: int,
    gpus: Path,
    variables: Mapping[str, str] | None = None,
) -> list[Started]:
    """Start one process for each rank; rank N has device N."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **(variables or {}),
    }
    return [
        start(python, program, arguments, gpus=gpus, variables={**common, "RANK": str(rank)})
        for rank in range(count)
    ]
