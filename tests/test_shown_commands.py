# SPDX-License-Identifier: Apache-2.0
"""Every `slurm-health` command line that a page shows can be copied: the command takes it."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from slurm_health.cli.main import commands
from tests.test_docs import PAGES, ROOT

# `$ slurm-health report 12 --json | jq .`, with what is set for it and whoever starts it.
SHOWN = re.compile(r"(?:[$#] )?(?:[A-Z_]+=\S+ |sudo |exec |srun (?:-\S+ )*)*slurm-health (\S.*)")
END = re.compile(r"[|>&;()]+")  # what a shell takes for itself
JOB = {"JOBID": "7", "JOB": "7"}


def lines_of_blocks(page: Path) -> Iterator[str]:
    """Yield the lines of a page that stand in code blocks; one that goes on in the next is one."""
    fenced, begun = False, ""
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            begun += line.strip()
            if begun.endswith("\\"):
                begun = begun[:-1] + " "
                continue
            yield begun
            begun = ""


def words_of(command: str) -> Iterator[str]:
    """Yield the words of a command, as far as they are the command's own."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for word in lexer:
        if END.fullmatch(word):
            return
        yield JOB.get(word, word)


def shown(page: Path) -> list[list[str]]:
    """Return the words of each command on a page, without the first."""
    found = map(SHOWN.fullmatch, lines_of_blocks(page))
    return [list(words_of(match[1])) for match in found if match]


# What each command says of itself with --help has explanations behind its examples.
HELP = ROOT / "docs/reference/commands.md"
COMMANDS = [(page, words) for page in PAGES if page != HELP for words in shown(page)]


def test_the_pages_show_many_commands() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize(
    ("page", "words"),
    COMMANDS,
    ids=[f"{page.relative_to(ROOT)}: {' '.join(words)}" for page, words in COMMANDS],
)
def test_a_command_that_a_page_shows_is_one(page: Path, words: list[str]) -> None:
    command: click.Command = commands
    context = click.Context(commands, **commands.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        found = command.get_command(context, name)
        assert found is not None, f"{page}: there is no command {name}"
        command = found
    try:
        command.make_context("slurm-health", list(words), parent=context)
    except click.exceptions.Exit:
        pass  # --help, --version
    except click.UsageError as err:
        pytest.fail(f"{page}: {err.format_message()}")


def test_what_the_first_tutorial_shows_is_what_the_commands_print() -> None:
    page = (ROOT / "docs/tutorial/first-check.md").read_text()
    blocks = re.findall(r"^    \$ slurm-health ((?:plan|explain) .*)\n((?:    .*\n)+)", page, re.M)
    assert len(blocks) == 2
    for command, output in blocks:
        printed = CliRunner().invoke(commands, shlex.split(command)).stdout.splitlines()
        lines = iter(printed)  # each line of the page comes after the one before
        missing = [
            line
            for line in textwrap.dedent(output).splitlines()
            if line.strip() != "…" and line not in lines
        ]
        assert missing == [], printed
