# SPDX-License-Identifier: Apache-2.0
"""What comes with slurm-health: `templates` and `explain`.

Scripts that people edit, and what is known of errors of GPUs and lines of the kernel's log.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from slurm_health.cli.output import print_result, terminal
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import ExitCode, UsageError
from slurm_health.records.text import cut, one_line
from slurm_health.system import templates as shelf
from slurm_health.system.templates import TemplateKind

if TYPE_CHECKING:
    from slurm_health.node.rules.meaning import Meaning

_COMMAND = "slurm-health"
_TITLES = {
    TemplateKind.BATCH_SCRIPT: "Batch scripts that check their nodes, for sbatch:",
    TemplateKind.WRAPPER: "For programs that call sbatch by its name:",
    TemplateKind.HOOK: "For slurm.conf, as root (slurm-health init-hooks writes all three):",
}
_WIDEST = 100
_QUOTED = 100  # characters of what is not known
_MAKES = {
    Status.PASS: "nothing: it is held against no node",
    Status.WARN: "a warning: it is logged, and drains nothing",
    Status.NODE_FAULT: "a fault of the node: jobs are kept away, and the node is drained",
}
_SHORT = {Status.PASS: "no fault", Status.WARN: "warning", Status.NODE_FAULT: "node fault"}


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


@click.command(short_help="Say what an Xid, an SXid or a line of the kernel's log means.")
@click.argument("words", nargs=-1, metavar="[WHAT]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list of all.")
def explain(words: tuple[str, ...], as_json: bool) -> int:
    """Say what an error of a GPU or an NVSwitch, or a line of the kernel's log, means: what it is,
    whose problem, what the checks make of it by default, and what to do.

    \b
    slurm-health explain 79              the Xid of a GPU that fell off the bus
    slurm-health explain sxid 22003      an error of an NVSwitch
    slurm-health explain soft-lockup     a kind of line
    slurm-health explain "$(dmesg | grep -m 1 Xid)"   a whole line: it tells more
    slurm-health explain                 all that is known

    Nothing on this machine is looked at. A site may decide otherwise, with fault, warn and ignore
    of its checks xid and kernel-log.
    """  # noqa: D205, D301 - one sentence; \b is click's mark for a block that keeps its lines
    from slurm_health.node.rules.meaning import all_meanings, meaning_of

    if not words:
        known = all_meanings()
        print_result((_meanings_json(known) if as_json else _meanings_text(known)) + "\n")
        return int(ExitCode.HEALTHY)
    asked = " ".join(words).strip()
    if not asked:
        raise UsageError(
            "nothing to explain: the argument is empty, perhaps because a search of the kernel's"
            " log found nothing. Give a number, a line in quotes, or no argument for the list"
        )
    found = meaning_of(asked)
    if found is None:
        raise UsageError(
            f"{cut(one_line(asked), _QUOTED)}: not known to the checks, so they hold it against"
            " no node. Give a number (79, sxid 22003), a whole line in quotes, or a name"
            " from the list that `slurm-health explain` prints"
        )
    print_result((_meanings_json(found) if as_json else _meaning_text(found)) + "\n")
    return int(ExitCode.HEALTHY)


def _meanings_json(found: Meaning | Sequence[Meaning]) -> str:
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def _meaning_text(found: Meaning) -> str:
    rows = (
        ("whose", found.whose),
        (f"check {found.check}", _MAKES[found.status]),
        ("what to do", found.helps),
        ("source", found.source),
    )
    lines = [f"{found.name}: {found.what}", *(f"  {name:<16}  {text}" for name, text in rows)]
    return "\n".join(lines)


def _meanings_text(known: Sequence[Meaning]) -> str:
    from tabulate import tabulate

    rows = [(each.name, _SHORT[each.status], each.whose, each.what) for each in known]
    return tabulate(rows, headers=("NAME", "FINDING", "WHOSE", "WHAT"), tablefmt="plain")
