# SPDX-License-Identifier: Apache-2.0
"""Completion as a shell does it: its script is read by a real bash, which then completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health

COMPLETE = """
. /dev/stdin
COMP_WORDS=({words}) COMP_CWORD={index}
_slurm_health_completion slurm-health
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    quoted = " ".join(("slurm-health", *words))
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE.format(words=quoted, index=len(words))],
        input=script.replace("complete -o nosort", "true"),  # binds a key that nobody presses
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(
    shutil.which("slurm-health", path=Path(sys.executable).parent) is None,
    reason="slurm-health is not installed beside this interpreter",
)
def test_bash_completes_commands_and_their_options() -> None:
    script = slurm_health("completion", "bash").stdout

    assert "history" in completed(script, "hi")
    assert completed(script, "clean", "--older") == ["--older-than"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    done = slurm_health("completion", shell)

    assert done.code == 0, done
    assert "_SLURM_HEALTH_COMPLETE" in done.stdout


def test_an_unknown_shell_is_one_line_that_names_the_known() -> None:
    done = slurm_health("completion", "csh")

    assert done.code == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
