# SPDX-License-Identifier: Apache-2.0
"""`slurm-health templates`: the scripts that come with slurm-health, to be edited."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from slurm_health.cli.output import page_here, print_lines, print_result
from slurm_health.records.errors import ExitCode
from slurm_health.system import templates as shelf


@click.command()
@click.argument("name", required=False)
def templates(name: str | None) -> int:
    """List the scripts that come with slurm-health, or print the one of this NAME.

    \b
    slurm-health templates
    slurm-health templates sweep > sweep.sbatch

    What to do with it is printed on standard error. A script that runs slurm-health runs this
    installation of it.
    """  # noqa: D301 - \b is click's mark for a block that keeps its lines
    if name is None:
        page = page_here()
        for title, rows in shelf.listed().items():
            lines = [title, *(f"  {line}" for line in page.titled(rows)), ""]
            print_lines(lines)
        print_result("To print one: slurm-health templates NAME\n")
        return ExitCode.HEALTHY
    template = shelf.find(name)
    places = (Path(sys.argv[0]), Path(sys.executable).with_name("slurm-health"))
    commands = (str(p.absolute()) for p in places if p.name == "slurm-health" and p.exists())
    command = next(commands, "slurm-health")
    print_result(shelf.edited(template.text, {"command": command, "python": sys.executable}))
    click.echo(f"slurm-health: {template.next_step}", err=True)
    if template.kind is shelf.TemplateKind.BATCH_SCRIPT and shutil.which("slurm-health") is None:
        path = f"export PATH={Path(command).parent}:$PATH"
        click.echo(f"slurm-health: the job calls slurm-health, so first: {path}", err=True)
    return ExitCode.HEALTHY
