# SPDX-License-Identifier: Apache-2.0
"""`sbatch` and `run`: their words are those of sbatch and torchrun, so click reads none of them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click
from click.shell_completion import CompletionItem

from slurm_health.preflight.options import DRY_RUN, FOR_JOB, FOR_RUN, JobOption

_FILLED_IN = """Filled in from Slurm: --nnodes, --rdzv-backend, --rdzv-endpoint (the first node),
--rdzv-id. All of torchrun's options are accepted: see torchrun --help."""


class PassesOn(click.Command):
    """A command whose words are another program's too: ours are completed and explained."""

    def __init__(self, *args: Any, job_options: tuple[JobOption, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = job_options

    def shell_complete(self, _: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what a word that begins like an option may become."""
        names = (f"--{option.name}" for option in self._options)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    def format_options(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Describe our options, and what Slurm fills in."""
        with formatter.section("Options"):
            rows = [(f"--{own.name} {own.metavar}".strip(), own.help) for own in self._options]
            formatter.write_dl([*rows, ("-h, --help", "Show this text.")], col_max=24)
        formatter.write_paragraph()
        formatter.write_text(_FILLED_IN)


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of a word to the shell, which knows files."""
    return [CompletionItem(incomplete, type="file")]


@click.command(
    cls=PassesOn,
    job_options=FOR_RUN,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    options_metavar="[OPTIONS, ALSO TORCHRUN'S]",
)
@click.argument(
    "arguments",
    metavar="SCRIPT [ARGS...]",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=_files,
)
def run(arguments: tuple[str, ...]) -> int:
    """Start a training with torchrun, and check its nodes first if asked to. Once per node:

    \b
        srun --ntasks-per-node=1 slurm-health run --network-check \\
            --nproc_per_node=8 --max_restarts=3 train.py

    Without Slurm, once per machine; the machines need to share nothing:

    \b
        NODE_RANK=0 MASTER_ADDR=10.0.0.1 slurm-health run --network-check \\
            --nnodes=4 train.py

    With --nnodes=MIN:MAX it starts with the healthy nodes if at least MIN are left. With a fixed
    number and a bad node nothing starts, and all end with 1.
    """  # noqa: D301, D415 - click reads the backslash
    from slurm_health.torchrun.train import train

    return train(list(arguments), dict(os.environ))


@click.command(
    cls=PassesOn,
    job_options=(*FOR_JOB, DRY_RUN),
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
def sbatch(arguments: tuple[str, ...]) -> int:
    """Submit a batch job that is checked first; a drop-in for sbatch."""
    from slurm_health.preflight.sbatch.submit import submit

    return submit(
        list(arguments),
        environ=dict(os.environ),
        stdin=sys.stdin.buffer,
        python=sys.executable,
        now_s=time.time(),
        verbose=click.get_current_context().find_root().params["verbose"],
    )
