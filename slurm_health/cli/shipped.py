# SPDX-License-Identifier: Apache-2.0
"""What comes with slurm-health: `templates`, `docs` and `completion`.

Scripts that people edit, the pages of the documentation, and what a shell completes commands with.
"""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from slurm_health.cli.output import print_result, terminal
from slurm_health.records.errors import ExitCode
from slurm_health.system import templates as shelf
from slurm_health.system.templates import TemplateKind

if TYPE_CHECKING:
    pass

_COMMAND = "slurm-health"
_VARIABLE = "_SLURM_HEALTH_COMPLETE"  # as click derives it from the name
_TITLES = {
    TemplateKind.BATCH_SCRIPT: "Batch scripts that check their nodes, for sbatch:",
    TemplateKind.WRAPPER: "For programs that call sbatch by its name:",
    TemplateKind.HOOK: "For slurm.conf, as root (slurm-health init-hooks writes all three):",
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
        found=shutil.which(_COMMAND),
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
    width = min(terminal()[0] or _WIDEST, _WIDEST)
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
    return "\n".join([*parts, f"To copy one: {_COMMAND} templates copy NAME [DESTINATION]\n"])


@click.command(short_help="Print a script that completes commands in a shell.")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print a script with which a shell completes commands and options of slurm-health.

    SHELL is bash, zsh or fish.

    \b
    bash   slurm-health completion bash \\
               > ~/.local/share/bash-completion/completions/slurm-health
    zsh    slurm-health completion zsh > DIR/_slurm-health   DIR: one of $fpath
    fish   slurm-health completion fish \\
               > ~/.config/fish/completions/slurm-health.fish
    """  # noqa: D301 - click reads the backslash
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    print_result(kind(context.find_root().command, {}, _COMMAND, _VARIABLE).source() + "\n")
    return int(ExitCode.HEALTHY)


@click.command(short_help="Print a page of the documentation.")
@click.argument("page", required=False)
def docs(page: str | None) -> int:
    """Print a page of the documentation; without PAGE, list the pages."""
    pages = _pages()
    if page is None:
        print_result(_pages_text(pages))
        return int(ExitCode.HEALTHY)
    path = pages.get(page) or pages.get(Path(page).stem)
    if path is None:
        near = difflib.get_close_matches(page, pages, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "slurm-health docs lists them."
        raise click.UsageError(f"No page {page!r}. {hint}")
    print_result(path.read_text(encoding="utf-8"))
    return int(ExitCode.HEALTHY)


def _pages() -> dict[str, Path]:
    """Return every page by its name: the tutorial first, then the guides."""
    root = shelf.shipped("docs")
    order = {"tutorial.md": 0, "howto": 1, "admin": 2}
    paths = sorted(
        root.rglob("*.md"), key=lambda path: (order.get(path.relative_to(root).parts[0], 3), path)
    )
    return {path.stem: path for path in paths}


def _pages_text(pages: dict[str, Path]) -> str:
    width = max(map(len, pages))
    lines = [f"  {name:<{width}}  {_title(path)}\n" for name, path in pages.items()]
    return "".join(["Pages, for slurm-health docs PAGE:\n", *lines])


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()
