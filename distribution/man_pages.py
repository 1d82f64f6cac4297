# SPDX-License-Identifier: Apache-2.0
"""A man page for each command, from what it says of itself with --help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from click.testing import CliRunner

from slurm_health import __version__
from slurm_health.cli.main import commands

_WIDTH = 78
_UNWRAPPED = "\b"  # click's mark of a paragraph whose lines stay as they are


def pages() -> dict[str, str]:
    """Return the text of every page by its file's name."""
    root = click.Context(commands, info_name="slurm-health", **commands.context_settings)
    return {f"{_name(each)}.1": _page(each) for each in _contexts(root)}


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command, and of each below it."""
    yield context
    for each in _below(context):
        yield from _contexts(each)


def _below(context: click.Context) -> list[click.Context]:
    group = context.command
    if not isinstance(group, click.Group):
        return []
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return [
        click.Context(each, info_name=name, parent=context, **each.context_settings)
        for name, each in found.items()
        if each is not None and not each.hidden
    ]


def _name(context: click.Context) -> str:
    return "-".join(_words(context))


def _page(context: click.Context) -> str:
    name, command = _name(context), context.command
    lines = [
        f'.TH "{_escaped(name.upper())}" 1 "" "slurm-health {__version__}"',
        ".SH NAME",
        f"{_escaped(name)} \\- {_escaped(_purpose(command))}",
        ".SH SYNOPSIS",
        f".B {_escaped(' '.join(_words(context)))}",
        _escaped(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_described(context),
    ]
    below = _below(context)
    if below:
        lines.append(".SH COMMANDS")
        for each in below:
            lines += [".TP", f".BR {_escaped(_name(each))} (1)", _line(_purpose(each.command))]
    if context.parent:
        lines += [".SH SEE ALSO", f".BR {_escaped(_name(context.parent))} (1)"]
    return "\n".join(lines) + "\n"


def _words(context: click.Context) -> list[str]:
    return [*(_words(context.parent) if context.parent else []), str(context.info_name)]


def _purpose(command: click.Command) -> str:
    return command.get_short_help_str(200).rstrip(".")


def _described(context: click.Context) -> Iterator[str]:
    options = list(_options(context))
    if options:
        yield from _paragraphs(context.command.help or "")
        yield from options
        return
    # One that leaves its options to another parser prints its own help.
    ran = CliRunner(env={"COLUMNS": str(_WIDTH)}).invoke(
        commands, [*_words(context)[1:], "--help"], prog_name="slurm-health", terminal_width=_WIDTH
    )
    assert ran.exit_code == 0, ran.output
    yield from (".nf", *map(_line, ran.stdout.splitlines()), ".fi")


def _paragraphs(text: str) -> Iterator[str]:
    cleaned = inspect.cleandoc(text).split("\f", maxsplit=1)[0].strip()
    for number, paragraph in enumerate(re.split(r"\n{2,}", cleaned)):
        if number:
            yield ".PP"
        lines = paragraph.splitlines()
        if lines[:1] == [_UNWRAPPED]:
            yield from (".RS 4", ".nf", *map(_line, lines[1:]), ".fi", ".RE")
        else:
            yield from map(_line, lines)


def _options(context: click.Context) -> Iterator[str]:
    """Yield the options as --help lists them, a command's own sections included."""
    formatter = _Formatter()
    context.command.format_options(context, formatter)
    yield from formatter.lines


class _Formatter(click.HelpFormatter):
    """Takes down what a command says of its options, before it is fitted to a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def write_heading(self, heading: str) -> None:
        self.lines.append(f".SH {_escaped(heading.upper())}")

    def write_text(self, text: str) -> None:
        self.lines += [".PP", *_paragraphs(text)]

    def write_dl(
        self,
        rows: object,
        col_max: int = 30,  # noqa: ARG002 - click's
        col_spacing: int = 2,  # noqa: ARG002 - click's
    ) -> None:
        assert isinstance(rows, list)
        for term, meaning in rows:
            self.lines += [".TP", f".B {_escaped(term)}", _line(meaning)]


def _line(text: str) -> str:
    """Return a line that roff does not take for a request."""
    escaped = _escaped(text.strip(" ") if not text.startswith("  ") else text)
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped


def _escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
