# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: torchrun that knows Slurm, and checks the nodes first if told to."""

from __future__ import annotations

import os

import click

from slurm_health.cli.shared_options import PassesOn, files
from slurm_health.preflight.options import Door, options_of

_FILLED = (
    ("--nnodes", "the number of nodes of the step"),
    ("--rdzv-backend", "c10d"),
    ("--rdzv-endpoint", "the first node; a port of this start's own"),
    ("--rdzv-id", "job, restart and step"),
    ("--node-rank", "with --rdzv-backend=static: the node's place in the step"),
)


class _RunCommand(PassesOn):
    """Describes our options, which torchrun's parser reads, beside what is filled in."""

    door = Door.RUN

    def format_options(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            ours = [
                (f"--{each.name} {each.kind.metavar}".strip(), each.described)
                for each in options_of(Door.RUN).values()
            ]
            formatter.write_dl([*ours, ("-h, --help", "Show this text.")])
        with formatter.section("Filled in from Slurm where you do not give it"):
            formatter.write_dl(list(_FILLED))
        formatter.write_paragraph()
        formatter.write_text("All of torchrun's options are accepted: see torchrun --help.")


@click.command(
    cls=_RunCommand,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    options_metavar="[OPTIONS, ALSO TORCHRUN'S]",
    short_help="torchrun that knows Slurm and can check the nodes first.",
)
@click.argument(
    "arguments",
    metavar="SCRIPT [ARGS...]",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=files,
)
def run(arguments: tuple[str, ...]) -> int:
    """Start a training with torchrun, checked first if told to. Once per node:

    \b
        srun --ntasks-per-node=1 slurm-health run --network-check \\
            --nproc_per_node=8 --max_restarts=3 train.py

    Without Slurm, once per machine, which need to share nothing:

    \b
        NODE_RANK=0 MASTER_ADDR=10.0.0.1 slurm-health run --network-check --nnodes=4 train.py

    With --nnodes=MIN:MAX it starts with the healthy nodes if at least MIN are left; a node that
    is left out says why and ends with 0, so that the step ends as the training does. With a fixed
    number and a bad node nothing starts, and all end with 1.
    """  # noqa: D301, D415 - click reads the backslash
    from slurm_health.torchrun.train import train

    return train(list(arguments), dict(os.environ))
