# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the page of all commands, from their --help, and what else is made from the code."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from slurm_health.cli.main import commands
from tests import reference_pages

PAGE = Path(__file__).parents[1] / "docs/reference/commands.md"
WIDTH = 80
_BEGINNING = """\
# Commands

What each command says with `--help`. bash completes them after
`eval "$(_SLURM_HEALTH_COMPLETE=bash_source slurm-health)"`; zsh and fish take
`zsh_source` and `fish_source`.
"""


def page() -> str:
    return "\n".join([_BEGINNING, *_sections((), commands)])


def _sections(path: tuple[str, ...], command: click.Command) -> Iterator[str]:
    yield f"## {' '.join(('slurm-health', *path))}\n"
    yield textwrap.indent(_help_of(path), "    ")
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _sections((*path, name), found)


def _help_of(path: tuple[str, ...]) -> str:
    ran = CliRunner(env={"COLUMNS": str(WIDTH)}).invoke(
        commands, [*path, "--help"], prog_name="slurm-health", terminal_width=WIDTH
    )
    assert ran.exit_code == 0, ran.output
    return ran.stdout


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for path, text in reference_pages.pages().items():
        path.write_text(text, encoding="utf-8")
