# SPDX-License-Identifier: Apache-2.0
"""Runs `slurm-health` as its users do: a real process, its words and its exit code."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEADLINE_S = 90.0
COMMAND = (sys.executable, "-m", "slurm_health")


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


def slurm_health(*words: str, environ: Mapping[str, str] | None = None) -> Done:
    done = subprocess.run(
        [*COMMAND, *words],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Done(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def start(
    *words: str, environ: Mapping[str, str] | None = None, within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a shell does.

    `within` are the words of a program that runs those which follow it, as `env` does.
    """
    return subprocess.Popen(
        [*within, *COMMAND, *words],
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> Done:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return Done(code=process.returncode, stdout=stdout, stderr=stderr)


def one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
