# SPDX-License-Identifier: Apache-2.0
"""The files with which shells complete commands, below share/ where each shell looks."""

from __future__ import annotations

from click.testing import CliRunner

from slurm_health.cli.main import commands

_FILES = {
    "bash": "bash-completion/completions/slurm-health",
    "zsh": "zsh/site-functions/_slurm-health",
    "fish": "fish/vendor_completions.d/slurm-health.fish",
}


def files() -> dict[str, str]:
    """Return the text of each file by its path below share/."""
    return {path: _script(shell) for shell, path in _FILES.items()}


def _script(shell: str) -> str:
    done = CliRunner().invoke(commands, ["completion", shell], prog_name="slurm-health")
    assert done.exit_code == 0, done.output
    return done.stdout
