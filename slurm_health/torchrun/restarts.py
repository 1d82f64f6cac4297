# SPDX-License-Identifier: Apache-2.0
"""What follows when workers of a training have failed: decided by the first node, done by all."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from slurm_health.preflight.decide.check_again import check_again
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.records.errors import JournalError
from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import (
    Diagnosed,
    TrainingEvent,
    TrainingPlanned,
    WorkersEnded,
)
from slurm_health.report.sentences import ends_for_hang
from slurm_health.system import journal
from slurm_health.torchrun.arguments import CHECKS, Arguments
from slurm_health.torchrun.check import say
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.process import TorchrunEnd
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.failure import JobAtFailure, planned, what_follows
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import (
    CheckNodes,
    DataCollector,
    DiagnosisAction,
    RestartRanks,
    StopJob,
)
from slurm_health.training.monitor import post_mortem, registry
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.restart import check_took_s

_HOST = re.compile(r"^(\s{2}host\s+: ).*$", re.MULTILINE)  # in torchrun's summary
_LOST_STORE = re.compile(r"^.*RendezvousConnectionError.*$", re.MULTILINE)
_QUICK = "network-check"  # takes seconds


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Workers have ended on all nodes, because some have failed.

    Args:
        place: of this process among those of the start.
        arguments: of the command.
        directory: of the last check in the journal, None without one.
        restart: the number of the restart that may follow.
        least: with how few nodes the training goes on.
        ended: how torchrun ended here.
        hangs_before: for which workers were ended in earlier starts.
    """

    place: TaskPlace
    arguments: Arguments
    directory: Path | None
    restart: int
    least: int
    ended: TorchrunEnd
    hangs_before: tuple[TrainingEvent, ...] = ()


class WorkersOutput(DataCollector):
    """What the workers of all nodes wrote at last."""

    kind = "job-output"
    data = TrainingLog

    def __init__(self, reports: Sequence[WorkersEnded]) -> None:
        self._reports = reports

    def collect_data(self) -> TrainingLog:
        """Return what they wrote; torchrun reports the failures of its own node alone.

        A torchrun that loses the store because another one has ended is no cause of that.
        """
        texts = [
            (report.node, _HOST.sub(rf"\g<1>{report.node}", report.output))
            for report in self._reports
        ]
        later = [(node, _LOST_STORE.sub("", text)) for node, text in texts[1:]]
        return read_output([*texts[:1], *later])


def decide(
    failure: Failure, reports: Sequence[WorkersEnded], silent: int, environ: Mapping[str, str]
) -> TrainingPlanned:
    """Return what follows a failure, and on which nodes; report and record it.

    Args:
        failure: of the workers.
        reports: of the nodes, in the order of their ends.
        silent: how many nodes have not reported.
        environ: the workers' environment.
    """
    place, most = failure.place, failure.arguments.max_restarts
    reported = {report.node for report in reports}
    joined = sorted(reported.difference(place.nodes))
    names = tuple(node for node in (*place.nodes, *joined) if node in reported)
    diagnosed = _diagnosed(failure, reports, names, environ)
    if all(report.exit_code for report in reports):
        chosen = _action(failure, diagnosed, names, silent)
    else:
        chosen = StopJob(reason="the workers of other nodes have ended well")
    nodes = chosen.nodes if isinstance(chosen, CheckNodes) else names
    then = {
        RestartRanks.kind: "starting the workers again",
        CheckNodes.kind: f"checking {fold(nodes)} before the workers start",
    }.get(chosen.kind)
    if then:
        say(f"{chosen.reason}; {then} (restart {failure.restart} of {most})")
    elif most or failure.ended.hang is not None:  # else torchrun reports it
        say(f"the training ends: {chosen.reason}")
    if failure.directory is not None:
        try:
            writer = journal.Writer(failure.directory, journal.RESTART, time.time)
            writer.append(planned(chosen, restart=failure.restart, max_restarts=most))
        except JournalError as err:
            say(f"the failure is not recorded: {err}")
    return TrainingPlanned(plan=chosen.kind, nodes=list(nodes), reason=chosen.reason)


def for_restart(arguments: Arguments, directory: Path | None) -> Arguments:
    """Return the command's arguments for the check before a restart.

    It is the one that was asked for, unless that takes long; the first one is in `directory`.
    """
    took_s = None
    if directory is not None:
        with contextlib.suppress(JournalError):  # then how long it took is not known
            took_s = check_took_s(directory)
    asked = arguments.check if arguments.checks else None
    again = check_again(asked, took_s if asked else None, quick=_QUICK)
    if again.less:
        say(f"that check is quick: {again.less}")
    own = {name: value for name, value in arguments.own.items() if name not in CHECKS}
    own |= dict.fromkeys(again.check.replace("-", "_").split(","), True)
    return msgspec.structs.replace(arguments, own=own)


def _diagnosed(
    failure: Failure,
    reports: Sequence[WorkersEnded],
    names: tuple[str, ...],
    environ: Mapping[str, str],
) -> Diagnosed | None:
    """Return what the workers' last words say of the cause, and in Slurm what all nodes say."""
    place = failure.place
    in_slurm = "SLURM_JOB_ID" in environ
    script = failure.arguments.program[0]
    job = EndedJob(
        end=ScriptEnd(
            exit_code=1,
            nodes=place.nodes if in_slurm else names,
            script=script,
            in_slurm=in_slurm,
        ),
        environ=environ,
        node=place.node,
        directory=Path.cwd(),
        ended_s=failure.ended.ended_s,
        duration_s=failure.ended.ran_s,
        run_directory=failure.directory,
    )
    others = [
        collector for collector in registry.after_failure(job) if collector.data is not TrainingLog
    ]
    return post_mortem.run_post_mortem(
        job,
        failure.directory,
        clock=lambda: failure.ended.ended_s,
        collectors=[WorkersOutput(reports), *others],
        out=sys.stderr,
    )


def _action(
    failure: Failure, diagnosed: Diagnosed | None, names: tuple[str, ...], silent: int
) -> DiagnosisAction:
    """Return what is to be done: as for a failed script, and within what torchrun may."""
    most = failure.arguments.max_restarts
    if failure.ended.hang is not None and failure.arguments.on_hang == OnHang.STOP.value:
        return StopJob(reason=ends_for_hang(OnHang.STOP.value))
    if failure.restart > most:
        return StopJob(reason=f"its workers were started again {most} times (--max-restarts)")
    job = JobAtFailure(
        batch_node="",  # the training can do without any of them
        nodes=names,
        restarted_unchecked=failure.restart > 1,
        least=failure.least,
        hang=failure.ended.hang,
        hangs_before=failure.hangs_before,
    )
    action = what_follows(diagnosed, job)
    if isinstance(action, StopJob) or not silent:
        return action
    gone = f"{silent} of {len(names) + silent} nodes do not answer any more"
    if len(names) < failure.least:
        reason = f"{gone}, and --nnodes asks for at least {failure.least}"
        return StopJob(reason=reason, evidence=action.evidence)
    if isinstance(action, RestartRanks):
        action = CheckNodes(reason=action.reason, nodes=names, evidence=action.evidence)
    return replace(action, reason=f"{gone}; {action.reason}")
