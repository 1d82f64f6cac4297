# SPDX-License-Identifier: Apache-2.0
"""`sbatch` and `run`: their words are those of sbatch and torchrun, so click reads none of them."""

from __future__ import annotations

import os
import sys
import time

import click
from click.shell_completion import CompletionItem

from slurm_health.preflight.options import DRY_RUN, FOR_JOB, FOR_RUN, JobOption

_FILLED = (
    ("--nnodes", "the number of nodes of the step"),
    ("--rdzv-backend", "c10d"),
    ("--rdzv-endpoint", "the first node; a port of this start's own"),
    ("--rdzv-id", "job, restart and step"),
    ("--node-rank", "with --rdzv-backend=static: the node's place in the step"),
)


class PassesOn(click.Command):
    """A command whose words are another program's too: a shell completes our options."""

    job_options: tuple[JobOption, ...]

    def shell_complete(self, _: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return what a word that begins like an option may become."""
        names = (f"--{each.name}" for each in self.job_options)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of a word to the shell, which knows files."""
    return [CompletionItem(incomplete, type="file")]


class _RunCommand(PassesOn):
    """Describes our options, which torchrun's parser reads, beside what is filled in."""

    job_options = FOR_RUN

    def format_options(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            ours = [
                (f"--{option.name} {option.metavar}".strip(), option.help) for option in FOR_RUN
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
    """Start a training with torchrun, and check its nodes first if asked to. Once per node:

    \b
        srun --ntasks-per-node=1 slurm-health run --network-check \\
            --nproc_per_node=8 --max_restarts=3 train.py

    Without Slurm, once per machine; the machines need to share nothing:

    \b
        NODE_RANK=0 MASTER_ADDR=10.0.0.1 slurm-health run --network-check \\
            --nnodes=4 train.py

    With --nnodes=MIN:MAX it starts with the healthy nodes if at least MIN are left; a node that
    is left out says why and ends with 0, so that the step ends as the training does. With a fixed
    number and a bad node nothing starts, and all end with 1.
    """  # noqa: D301, D415 - click reads the backslash
    from slurm_health.torchrun.train import train

    return train(list(arguments), dict(os.environ))


class _SbatchCommand(PassesOn):
    job_options = (*FOR_JOB, DRY_RUN)


@click.command(
    cls=_SbatchCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    short_help="Submit a batch job that is checked first; a drop-in for sbatch.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
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
