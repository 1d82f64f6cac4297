# SPDX-License-Identifier: Apache-2.0
"""`slurm-health explain`: what an Xid, an SXid or a line of the kernel's log means."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec
from tabulate import tabulate

from slurm_health.cli.output import print_result
from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.meaning import Meaning
from slurm_health.records.errors import ExitCode, UsageError
from slurm_health.records.text import cut, one_line

_QUOTED = 100  # characters of what nobody knows
_MAKES = {
    Status.PASS: "nothing: it is held against no node",
    Status.WARN: "a warning: it is logged, and drains nothing",
    Status.NODE_FAULT: "a fault of the node: jobs are kept away, and the node is drained",
}
_SHORT = {Status.PASS: "no fault", Status.WARN: "warning", Status.NODE_FAULT: "node fault"}


@click.command(short_help="Say what an Xid, an SXid or a line of the kernel's log means.")
@click.argument("words", nargs=-1, metavar="[WHAT]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list of all.")
def explain(words: tuple[str, ...], as_json: bool) -> int:
    """Say what an error of a GPU, of an NVSwitch or a line of the kernel's log means: what it is,
    whose matter, what the checks make of it by default, and what to do.

    \b
    slurm-health explain 79               the Xid of a GPU that has fallen off the bus
    slurm-health explain sxid 22003       an error of an NVSwitch
    slurm-health explain soft-lockup      a kind of line
    slurm-health explain "$(dmesg | grep -m 1 Xid)"     a whole line, which decides more
    slurm-health explain                  all that is known

    It asks nothing of this machine. A site may have decided otherwise, with fault, warn and ignore
    of its checks xid and kernel-log.
    """  # noqa: D205, D301 - one sentence; \b is click's mark for a block that keeps its lines
    from slurm_health.node.rules.meaning import all_meanings, meaning_of

    if not words:
        known = all_meanings()
        print_result((_json(known) if as_json else _table_text(known)) + "\n")
        return int(ExitCode.HEALTHY)
    asked = " ".join(words).strip()
    if not asked:
        raise UsageError(
            "what to explain is empty, as where a search of the kernel's log found nothing. Give"
            " a number, a line in quotes, or nothing at all for the list"
        )
    found = meaning_of(asked)
    if found is None:
        raise UsageError(
            f"{cut(one_line(asked), _QUOTED)}: nothing that the checks know, so they hold it"
            " against no node. Give a number (79, sxid 22003), a whole line in quotes, or a name"
            " from the list that `slurm-health explain` prints"
        )
    print_result((_json(found) if as_json else _text(found)) + "\n")
    return int(ExitCode.HEALTHY)


def _json(found: Meaning | Sequence[Meaning]) -> str:
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def _text(found: Meaning) -> str:
    rows = (
        ("whose", found.whose),
        (f"check {found.check}", _MAKES[found.status]),
        ("what to do", found.helps),
        ("source", found.source),
    )
    lines = [f"{found.name}: {found.what}", *(f"  {name:<16}  {text}" for name, text in rows)]
    return "\n".join(lines)


def _table_text(known: Sequence[Meaning]) -> str:
    rows = [(each.name, _SHORT[each.status], each.whose, each.what) for each in known]
    return tabulate(rows, headers=("NAME", "FINDING", "WHOSE", "WHAT"), tablefmt="plain")
