# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sbatch`: its words are sbatch's, so click reads none of them."""

from __future__ import annotations

import os
import sys
import time

import click

from slurm_health.cli.shared_options import PassesOn, files
from slurm_health.preflight.options import Door
from slurm_health.preflight.sbatch.submit import submit


class _SbatchCommand(PassesOn):
    door = Door.SBATCH


@click.command(
    cls=_SbatchCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    short_help="Submit a batch job that is checked first; a drop-in for sbatch.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def sbatch(arguments: tuple[str, ...]) -> int:
    """Submit a batch job that is checked first; a drop-in for sbatch."""
    return submit(
        list(arguments),
        environ=dict(os.environ),
        stdin=sys.stdin.buffer,
        python=sys.executable,
        now_s=time.time(),
    )
