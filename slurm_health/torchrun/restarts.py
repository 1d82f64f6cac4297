# SPDX-License-Identifier: Apache-2.0
"""What follows when workers of a training have failed: decided by one node, done by all.

The torchrun of each node (`in_job.watched_torchrun`) starts this with what `run` handed over, and a
question: on the node that leads, what is to be done; on all of them, to take part in a check. The
answer is the last line of standard output; what the user reads is on standard error.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health.preflight import config
from slurm_health.preflight.decide.check_again import check_again
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode, JournalError, SlurmHealthError
from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import Diagnosed, TrainingEvent
from slurm_health.report.sentences import ends_for_hang
from slurm_health.system import journal
from slurm_health.system.processes import die_with_parent
from slurm_health.system.signals import leaving_on
from slurm_health.torchrun.arguments import CHECKS, Arguments
from slurm_health.torchrun.check import KEY_VARIABLE, checked, say
from slurm_health.torchrun.earlier_check import measured_in
from slurm_health.torchrun.node_choice import Bounds, others_text
from slurm_health.torchrun.place import OUTSIDE_SLURM, TaskPlace
from slurm_health.torchrun.step import directory_of
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.failure import (
    JobAtFailure,
    planned,
    what_follows,
)
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import (
    CheckNodes,
    DataCollector,
    DiagnosisAction,
    LeaveNode,
    RestartRanks,
    StopJob,
)
from slurm_health.training.monitor import post_mortem, registry
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.restart import check_took_s

# What torchrun says of the worker that fails first: `failed (exitcode: -9) local_rank: 0 (pid: 12)`
_WORKER_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")

_QUICK = "network-check"  # takes seconds


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What `run` tells torchrun for later: this node's place among those that train.

    `least` is with how few nodes they go on; `shared_secret` is empty where there is none.
    """

    place: TaskPlace
    arguments: Arguments
    python: str
    least: int
    shared_secret: str = ""


class WorkersEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of its workers' end: the node's rank, and what they wrote at last."""

    node: str
    rank: int
    processes: int
    text: str


class RestartDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes are to do; for a check, who takes part in it, where they meet, and what it is.

    `checks` are names of options that ask for one.
    """

    next: str
    nodes: list[str] = []
    place: TaskPlace | None = None
    checks: tuple[str, ...] = (_QUICK,)


class RestartQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What torchrun asks: what to do, with the nodes' reports, or a check, with the `decision`.

    `silent` nodes have not reported. It would be restart number `restart` of `max_restarts`. The
    workers ran for `ran_s`, and were ended because of a `hang` if there was one; for `hangs_before`
    others were.
    """

    context: Context
    reports: list[WorkersEnd] = []
    silent: int = 0
    restart: int = 0
    max_restarts: int = 0
    decision: RestartDecision | None = None
    ran_s: float = 0.0
    hang: TrainingEvent | None = None
    hangs_before: tuple[TrainingEvent, ...] = ()


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The code to end with, None to go on; a node that ends with 0 only leaves the others."""

    exit_code: int | None


def on_hang(arguments: Arguments) -> str:
    """Return what is to be done about a hang."""
    return arguments.text("monitor") or OnHang.REPORT.value


def decide(
    question: RestartQuestion, clock_s: float, environ: Mapping[str, str]
) -> RestartDecision:
    """Return what follows a failure, and report and record it.

    `environ` is the one that the workers had.
    """
    context, place = question.context, question.context.place
    names = tuple(dict.fromkeys([place.node, *(report.node for report in question.reports)]))
    directory = _directory(question, environ)
    diagnosed = _diagnosed(question, directory, clock_s, environ)
    chosen = _plan(question, diagnosed, names)
    times = f"restart {question.restart} of {question.max_restarts}"
    match chosen:
        case StopJob() if question.max_restarts == 0 and question.hang is None:
            pass  # torchrun says it
        case StopJob() | LeaveNode():
            say(f"the training ends: {chosen.reason}")
        case RestartRanks():
            say(f"{chosen.reason}; starting the workers again ({times})")
        case CheckNodes():
            say(
                f"{chosen.reason}; checking {fold(chosen.nodes)} before the workers start ({times})"
            )
    if directory is not None:
        action = planned(chosen, restart=question.restart, max_restarts=question.max_restarts)
        try:
            journal.Writer(directory, journal.RESTART, lambda: clock_s).append(action)
        except JournalError as err:
            say(f"the failure is not recorded: {err}")
    if not isinstance(chosen, CheckNodes):
        return RestartDecision(next="restart" if isinstance(chosen, RestartRanks) else "stop")
    here = replace(place, start=f"{place.start}.{question.restart}")
    if here.meeting is not None:
        # torchrun's own store is at the port where the training meets.
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        here = replace(here, meeting=replace(here.meeting, port=port))
    took_s = None
    if directory is not None:
        with contextlib.suppress(JournalError):  # then how long the first check took is not known
            took_s = check_took_s(measured_in(directory))
    asked = context.arguments.check if context.arguments.checks else None
    again = check_again(asked, took_s if asked else None, quick=_QUICK)
    if again.less:
        say(f"that check is quick: {again.less}")
    return RestartDecision(
        next="check", nodes=list(chosen.nodes), place=here, checks=tuple(again.check.split(","))
    )


def check(context: Context, decision: RestartDecision, environ: Mapping[str, str]) -> Checked:
    """Take part in the check of the nodes that may go on, and say whether this one does.

    Raises:
        SlurmHealthError: this node cannot take part.
    """
    assert decision.place is not None
    own = context.place.node
    nodes = tuple(decision.nodes)
    if own not in nodes:
        say(f"{own} is LEFT OUT: it is at fault; training goes on with {others_text(len(nodes))}")
        return Checked(exit_code=ExitCode.HEALTHY)
    place = replace(decision.place, nodes=nodes, node=own)
    within = Bounds(least=context.least, most=len(nodes), host=nodes[0] if nodes[1:] else "")
    own_options = context.arguments.own.items()
    options = {name: value for name, value in own_options if name not in CHECKS}
    options |= {**dict.fromkeys(decision.checks, True), "check-again": True}
    arguments = msgspec.structs.replace(context.arguments, own=options)
    if context.shared_secret:
        environ = {**environ, KEY_VARIABLE: context.shared_secret}
    starting = checked(place, within, arguments, context.python, environ)
    return Checked(exit_code=starting if isinstance(starting, int) else None)


class WorkersOutput(DataCollector):
    """What the workers of all nodes wrote at last, as torchrun's nodes report it."""

    kind = "job-output"
    data = TrainingLog

    def __init__(self, reports: Sequence[WorkersEnd]) -> None:
        self._reports = reports

    def collect_data(self) -> TrainingLog:
        """Return what they wrote."""
        return _log_of(self._reports)


def _diagnosed(
    question: RestartQuestion, directory: Path | None, clock_s: float, environ: Mapping[str, str]
) -> Diagnosed | None:
    """Return what the workers' last words say of the cause, and in Slurm what all nodes say."""
    place = question.context.place
    in_slurm = place.cluster != OUTSIDE_SLURM
    nodes = place.nodes if in_slurm else tuple(report.node for report in question.reports)
    script = question.context.arguments.program[0]
    job = EndedJob(
        end=ScriptEnd(exit_code=1, nodes=nodes, script=script, in_slurm=in_slurm),
        environ=environ,
        node=place.node,
        directory=Path.cwd(),
        ended_s=clock_s,
        duration_s=question.ran_s,
        run_directory=directory,
    )
    others = [
        collector for collector in registry.after_failure(job) if collector.data is not TrainingLog
    ]
    collectors = [WorkersOutput(question.reports), *others]
    return post_mortem.run_post_mortem(
        job, directory, clock=lambda: clock_s, collectors=collectors, out=sys.stderr
    )


def _log_of(reports: Sequence[WorkersEnd]) -> TrainingLog:
    """Return what all nodes' workers wrote, in the order of their ends, with torchrun's summaries.

    torchrun itself prints one only when it gives up.
    """
    texts = []
    for report in reports:
        ended = {int(local): code for code, local in _WORKER_ENDED.findall(report.text)}
        summary = "".join(
            f"  host      : {report.node}\n"
            f"  rank      : {report.rank * report.processes + local}\n"
            f"  exitcode  : {code}\n"
            for local, code in ended.items()
        )
        texts.append((report.node, f"{report.text}\n{summary}"))
    log = read_output(texts)
    nodes = {
        report.rank * report.processes + local: report.node
        for report in reports
        for local in range(report.processes)
    }
    named = [
        failure
        if failure.rank is None
        else msgspec.structs.replace(failure, node=nodes.get(failure.rank, ""))
        for failure in log.failures
    ]
    return msgspec.structs.replace(log, failures=tuple(named))


def _plan(
    question: RestartQuestion, diagnosed: Diagnosed | None, names: tuple[str, ...]
) -> DiagnosisAction:
    """Return what is to be done: as for a failed script, and within what torchrun may."""
    least = question.context.least
    mode = on_hang(question.context.arguments)
    if question.hang is not None and mode == OnHang.STOP.value:
        return StopJob(reason=ends_for_hang(OnHang.STOP.value))
    if question.restart > question.max_restarts:
        times = question.max_restarts
        return StopJob(reason=f"its workers were started again {times} times (--max-restarts)")
    job = JobAtFailure(
        batch_node=question.context.place.node,
        nodes=names,
        restarted_unchecked=question.restart > 1,
        least=least,
        hang=question.hang,
        hangs_before=question.hangs_before,
    )
    action = what_follows(diagnosed, job)
    if isinstance(action, StopJob) or not question.silent:
        return action
    silent = f"{question.silent} of {len(names) + question.silent} nodes do not answer any more"
    if len(names) < least:
        reason = f"{silent}, and --nnodes asks for at least {least}"
        return StopJob(reason=reason, evidence=action.evidence)
    if isinstance(action, RestartRanks):
        action = CheckNodes(reason=action.reason, nodes=names, evidence=action.evidence)
    return replace(action, reason=f"{silent}; {action.reason}")


def _directory(question: RestartQuestion, environ: Mapping[str, str]) -> Path | None:
    """Return where the check before this training was recorded, None where there is nothing."""
    root = config.journal_root(question.context.arguments.text("journal"), environ)
    try:
        directory = directory_of(root, question.context.place)
    except JournalError as err:
        say(f"the failure is not recorded: {err}")
        return None
    return directory if directory.is_dir() else None


def main() -> int:
    """Answer the question on standard input."""
    die_with_parent(signal.SIGTERM, os.getppid())()
    question = from_json(sys.stdin.buffer.read(), RestartQuestion)
    answer: RestartDecision | Checked
    try:
        with leaving_on(signal.SIGTERM):
            if question.decision is None:
                answer = decide(question, time.time(), os.environ)
            else:
                answer = check(question.context, question.decision, os.environ)
    except SlurmHealthError as err:
        say(f"{question.context.place.node}: {err}")
        return err.exit_code
    with contextlib.suppress(BrokenPipeError):
        print(msgspec.json.encode(answer).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
