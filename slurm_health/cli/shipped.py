# SPDX-License-Identifier: Apache-2.0
"""What comes with slurm-health: scripts that people edit (`templates`)."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

import click

from slurm_health.cli.output import page_here, print_result
from slurm_health.records.errors import ExitCode
from slurm_health.system import templates as shelf
from slurm_health.system.templates import TemplateKind

_COMMAND = "slurm-health"
_TITLES = {
    TemplateKind.BATCH_SCRIPT: "Batch scripts that check their nodes, for sbatch:",
    TemplateKind.WRAPPER: "For programs that call sbatch by its name:",
    TemplateKind.HOOK: "For slurm.conf, as root (slurm-health init hooks writes all three):",
    TemplateKind.DASHBOARD: "For Grafana (documentation: admin/metrics.md):",
}
_WIDEST = 100


@click.group(
    invoke_without_command=True,
    short_help="List, show and copy batch scripts and other scripts to edit.",
)
@click.pass_context
def templates(context: click.Context) -> int:
    """List, show and copy the scripts that come with slurm-health: for batch jobs, for programs
    that call sbatch, and for slurm.conf.
    """  # noqa: D205 - one sentence
    if context.invoked_subcommand is None:
        print_result(_list_text())
    return int(ExitCode.HEALTHY)


@templates.command("list")
def list_command() -> int:
    """List the templates, and what each is for."""
    print_result(_list_text())
    return int(ExitCode.HEALTHY)


@templates.command()
@click.argument("name")
def show(name: str) -> int:
    """Print a template as `copy` would write it."""
    print_result(shelf.edited(shelf.find(name).text, _said()))
    return int(ExitCode.HEALTHY)


@templates.command()
@click.argument("name")
@click.argument("destination", default=".")
@click.option("--force", is_flag=True, help="Replace a script that is there already.")
def copy(name: str, destination: str, force: bool) -> int:
    """Copy a template, and say what to do with it.

    DESTINATION is a file, or a directory [default: this one]; one that ends with a slash is made.
    The copies that run slurm-health run this installation of it.
    """
    template, said = shelf.find(name), _said()
    try:
        path = shelf.copy(template, destination, said, force=force)
    except OSError as err:
        raise click.ClickException(f"cannot write {destination}: {err.strerror}") from err
    next_steps = shelf.next_steps(
        template,
        path,
        command=said["command"],
        on_path=shutil.which(_COMMAND),
        first_sbatch=shutil.which("sbatch"),
    )
    print_result(f"wrote {path}\n{next_steps}")
    return int(ExitCode.HEALTHY)


def _said() -> dict[str, str]:
    """Return where this slurm-health is, by the names of the lines that say so."""
    places = (Path(sys.argv[0]), Path(sys.executable).with_name(_COMMAND))
    found = (str(path.absolute()) for path in places if path.name == _COMMAND and path.exists())
    return {"command": next(found, _COMMAND), "python": sys.executable}


def _list_text() -> str:
    known = shelf.every().values()
    indent = max(len(template.name) for template in known) + 4
    width = min(page_here().width or _WIDEST, _WIDEST)
    parts = []
    for kind, title in _TITLES.items():
        lines = [
            textwrap.fill(
                template.purpose,
                max(width, 2 * indent),
                initial_indent=f"  {template.name}".ljust(indent),
                subsequent_indent=" " * indent,
            )
            for template in known
            if template.kind is kind
        ]
        parts.append("\n".join([title, *lines, ""]))
    copies = f"To copy one: {_COMMAND} templates copy NAME [DESTINATION]\n"
    return "\n".join([*parts, copies])
