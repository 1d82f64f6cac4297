# SPDX-License-Identifier: Apache-2.0
"""`slurm-health explain`: what an error means, or why a job failed by the files there are of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from slurm_health.cli.output import page_here, print_result
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import ExitCode, UsageError
from slurm_health.records.nodeset import expand
from slurm_health.records.text import cut, one_line

if TYPE_CHECKING:
    from slurm_health.node.rules.kernel_lines import KernelError

_QUOTED = 100  # characters of what is not known
_MAKES = {
    Status.PASS: "nothing: it is held against no node",
    Status.WARN: "a warning: it is logged, and drains nothing",
    Status.NODE_FAULT: "a fault of the node: jobs are kept away, and the node is drained",
}
_SHORT = {Status.PASS: "no fault", Status.WARN: "warning", Status.NODE_FAULT: "node fault"}


@click.command(short_help="Explain a failed job from its files, or an error by its number.")
@click.argument("words", nargs=-1, metavar="[FILE...|WHAT]")
@click.option("--nodes", metavar="NODELIST", help="The job's nodes, such as n[1-8].")
@click.option("--exit-code", type=click.IntRange(0, 255), help="The exit code of the script.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list of all.")
def explain(words: tuple[str, ...], nodes: str | None, exit_code: int | None, as_json: bool) -> int:
    """Explain why a job failed, from files of any job: its output, kernel logs (dmesg), Flight
    Recorder dumps, reports of NCCL's RAS, or directories of these. It needs neither Slurm nor the
    job's nodes. Or say what an error of a GPU, an NVSwitch or the kernel means.

    \b
    slurm-health explain slurm-77.out                 why job 77 failed
    slurm-health explain slurm-77.out dmesg.n3 --nodes n[1-4]
    slurm-health explain 79              the Xid of a GPU that fell off the bus
    slurm-health explain sxid 22003      an error of an NVSwitch
    slurm-health explain soft-lockup     a kind of line
    slurm-health explain "$(dmesg | grep -m 1 Xid)"   a whole line: it tells more
    slurm-health explain                 all that is known

    The exit code is 1 where a node is at fault, 3 where nothing decides whose fault it is, else 0.
    A site may judge an error otherwise, with fault, warn and ignore of its checks xid and
    kernel-log.
    """  # noqa: D205, D301 - one sentence; \b is click's mark for a block that keeps its lines
    from slurm_health.node.rules.kernel_lines import all_errors, explained

    paths = [Path(word) for word in words if _is_path(word)]
    if paths and len(paths) < len(words):
        missing = next(word for word in words if not _is_path(word))
        raise UsageError(f"there is no file {cut(one_line(missing), _QUOTED)}")
    if paths:
        return _explain_files(paths, nodes, exit_code, as_json)
    if nodes is not None or exit_code is not None:
        raise UsageError("--nodes and --exit-code are of a job: name files of it")
    if not words:
        known = list(all_errors())
        print_result((_meanings_json(known) if as_json else _meanings_text(known)) + "\n")
        return int(ExitCode.HEALTHY)
    asked = " ".join(words).strip()
    if not asked:
        raise UsageError(
            "nothing to explain: the argument is empty, perhaps because a search of the kernel's"
            " log found nothing. Give a number, a line in quotes, or no argument for the list"
        )
    found = explained(asked)
    if found is None:
        raise UsageError(
            f"{cut(one_line(asked), _QUOTED)}: not known to the checks, so they hold it against"
            " no node. Give a number (79, sxid 22003), a whole line in quotes, or a name"
            " from the list that `slurm-health explain` prints"
        )
    print_result((_meanings_json(found) if as_json else _meaning_text(found)) + "\n")
    return int(ExitCode.HEALTHY)


def _is_path(word: str) -> bool:
    try:
        return bool(word.strip()) and Path(word).exists()
    except (OSError, ValueError):  # a line of a log is too long for a name, or holds a NUL
        return False


def _explain_files(
    paths: Sequence[Path], nodes: str | None, exit_code: int | None, as_json: bool
) -> int:
    from slurm_health.report.sentences import lines_of
    from slurm_health.training.monitor.explain import explain

    try:
        names = expand(nodes) if nodes else ()
    except ValueError as err:
        raise UsageError(f"--nodes: {err}") from err
    diagnosed, explanation = explain(paths, nodes=names, exit_code=exit_code)
    if as_json:
        print_result(msgspec.json.format(msgspec.json.encode(explanation)).decode() + "\n")
    else:
        rows = [
            *lines_of(diagnosed),
            ("next", _FOLLOWS[_ENDED if explanation.blame == _ENDED else explanation.action]),
        ]
        width = max(len(title) for title, _ in rows) + 2
        columns = page_here().width
        for title, text in rows:
            indent = " " * width
            wrapped = textwrap.fill(
                text, max(40, columns or 1 << 16), initial_indent=indent, subsequent_indent=indent
            )
            print_result(f"{title:<{width}}{wrapped[width:]}\n")
    if explanation.accused:
        return int(ExitCode.BAD_NODES)
    undecided = explanation.blame == "undecided" and explanation.action != "none"
    return int(ExitCode.INCONCLUSIVE if undecided else ExitCode.HEALTHY)


_ENDED = "outside"
_FOLLOWS = {
    _ENDED: "nothing would be started again: what ended the job decides that",
    "restart": "with --max-restarts the script would be started again on the same nodes",
    "check": "with --max-restarts the nodes would be checked before the script is started again",
    "leave": "with --max-restarts the script would be started again without these nodes",
    "stop": "nothing would be started again: the same would fail the same way",
    "none": "nothing follows",
}


def _meanings_json(found: KernelError | Sequence[KernelError]) -> str:
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def _meaning_text(found: KernelError) -> str:
    rows = (
        ("whose", found.whose),
        (f"check {found.check}", _MAKES[found.status]),
        ("what to do", found.helps),
        ("source", found.source),
    )
    lines = [f"{found.name}: {found.what}", *(f"  {name:<16}  {text}" for name, text in rows)]
    return "\n".join(lines)


def _meanings_text(known: Sequence[KernelError]) -> str:
    from tabulate import tabulate

    rows = [(each.name, _SHORT[each.status], each.whose, each.what) for each in known]
    return tabulate(rows, headers=("NAME", "FINDING", "WHOSE", "WHAT"), tablefmt="plain")
