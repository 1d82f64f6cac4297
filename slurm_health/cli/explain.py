# SPDX-License-Identifier: Apache-2.0
"""`slurm-health explain`: what an error means, or why a job failed by the files there are of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from slurm_health.cli.options import json_option, number_option
from slurm_health.cli.output import page_here, print_answer
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import ExitCode, UsageError
from slurm_health.records.nodeset import expand
from slurm_health.records.text import cut, one_line

_QUOTED = 100  # characters of what is not known
_MAKES = {
    Status.PASS: "nothing: it is held against no node",
    Status.WARN: "a warning: it is logged, and drains nothing",
    Status.NODE_FAULT: "a fault of the node: jobs are kept away, and the node is drained",
}
_SHORT = {Status.PASS: "no fault", Status.WARN: "warning", Status.NODE_FAULT: "node fault"}
_NOT_OURS = "outside"
_NEXT = {
    _NOT_OURS: "nothing would be started again: what ended the job decides that",
    "restart": "with --max-restarts the script would be started again on the same nodes",
    "check": "with --max-restarts the nodes would be checked before the script is started again",
    "leave": "with --max-restarts the script would be started again without these nodes",
    "stop": "nothing would be started again: the same would fail the same way",
    "none": "nothing follows",
}


@click.command()
@click.argument("words", nargs=-1, metavar="[FILE...|WHAT]")
@click.option("--nodes", metavar="NODELIST", help="The job's nodes, such as n[1-8].")
@number_option("--exit-code", 0, 255, "The exit code of the script.", metavar="CODE")
@json_option
def explain(words: tuple[str, ...], nodes: str | None, exit_code: int | None, as_json: bool) -> int:
    """Explain why a job failed, from its files: output, kernel logs (dmesg), Flight Recorder dumps,
    reports of NCCL's RAS, or directories of these. It needs neither Slurm nor the job's nodes. Or
    explain an error of a GPU, an NVSwitch or the kernel, or a reason of a node in Slurm.

    \b
    slurm-health explain slurm-77.out             why job 77 failed
    slurm-health explain slurm-77.out dmesg.n3 --nodes n[1-4]
    slurm-health explain 79                       an Xid of a GPU
    slurm-health explain sxid 22003               an error of an NVSwitch
    slurm-health explain soft-lockup              a kind of line
    slurm-health explain "Kill task failed"       why Slurm drained a node
    slurm-health explain "$(dmesg | grep -m 1 Xid)"   a whole line
    slurm-health explain                          all that is known

    Exits 1 if it names a node at fault, 3 if nothing decides whose fault it is, else 0. A site may
    judge an error otherwise: fault, warn and ignore of its checks xid and kernel-log.
    """  # noqa: D205, D301 - one sentence; \b is click's mark for a block that keeps its lines
    from slurm_health.node.rules import slurm_reasons
    from slurm_health.node.rules.kernel_lines import all_errors, explained

    paths = [Path(word) for word in words if _is_path(word)]
    if paths and len(paths) < len(words):
        missing = next(word for word in words if not _is_path(word))
        raise UsageError(f"there is no file {cut(one_line(missing), _QUOTED)}")
    if paths:
        return _explain_files(paths, nodes, exit_code, as_json)
    if nodes is not None or exit_code is not None:
        raise UsageError("--nodes and --exit-code are of a job: name files of it")
    page = page_here()
    if not words:
        known = list(all_errors())
        rows = [(error.name, _SHORT[error.status], error.whose, error.what) for error in known]
        lines = page.table([("NAME", "FINDING", "WHOSE", "WHAT"), *rows])
        print_answer(known, "\n".join(lines) + "\n", as_json=as_json)
        return ExitCode.HEALTHY
    asked = " ".join(words).strip()
    reason, error = slurm_reasons.explained(asked), explained(asked)
    if reason is not None:
        title = f"{reason.name}: {reason.meaning}"
        facts = [("lifted when", reason.lifted_by.value), ("evidence", reason.evidence)]
        facts.append(("what to do", reason.advice))
    elif error is not None:
        title = f"{error.name}: {error.what}"
        facts = [("whose", error.whose), (f"check {error.check}", _MAKES[error.status])]
        facts += [("what to do", error.helps), ("source", error.source)]
    else:
        raise UsageError(
            f"{cut(one_line(asked), _QUOTED) or 'an empty text'}: no file, and not known to the"
            " checks, so held against no node. Give a file, a number (79, sxid 22003), a whole line"
            " in quotes, or a name from the list that `slurm-health explain` prints"
        )
    lines = [*page.paragraph(title), *page.titled(facts)]
    print_answer(reason or error, "\n".join(lines) + "\n", as_json=as_json)
    return ExitCode.HEALTHY


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
    follows = explanation.blame if explanation.blame == _NOT_OURS else explanation.action
    lines = page_here().titled([*lines_of(diagnosed), ("next", _NEXT[follows])])
    print_answer(explanation, "\n".join(lines) + "\n", as_json=as_json)
    if explanation.accused:
        return ExitCode.BAD_NODES
    undecided = explanation.blame in {"undecided", "node"} and explanation.action != "none"
    return ExitCode.INCONCLUSIVE if undecided else ExitCode.HEALTHY
