# SPDX-License-Identifier: Apache-2.0
"""`slurm-health completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from slurm_health.cli.terminal import print_result
from slurm_health.records.errors import ExitCode

_NAME = "slurm-health"
_VARIABLE = "_SLURM_HEALTH_COMPLETE"  # as click derives it from the name


@click.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print a script with which a shell completes commands and options of slurm-health.

    \b
    bash   slurm-health completion bash > ~/.local/share/bash-completion/completions/slurm-health
    zsh    slurm-health completion zsh > DIR/_slurm-health     with a DIR of your $fpath
    fish   slurm-health completion fish > ~/.config/fish/completions/slurm-health.fish
    """  # noqa: D301 - click reads the backslash
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    print_result(kind(context.find_root().command, {}, _NAME, _VARIABLE).source() + "\n")
    return int(ExitCode.HEALTHY)
