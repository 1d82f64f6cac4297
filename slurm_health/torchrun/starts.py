# SPDX-License-Identifier: Apache-2.0
"""A training on this node: one start after another, until it has ended or may not start again.

Each start has a torchrun of its own. It may begin with a check, and the first of its processes
leads it. When workers fail on a node, all nodes end theirs and report; the first process decides
what follows. If that one is lost, the others start again without it.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health.preflight import config
from slurm_health.preflight.decide.policy import Heartbeat, OnHang
from slurm_health.preflight.supervisor.monitor_process import AFTER_S, heartbeat_environ
from slurm_health.preflight.supervisor.script_runs import RESTART_COUNT
from slurm_health.records.errors import ChannelError, ExitCode, JournalError, UsageError
from slurm_health.records.nodeset import fold
from slurm_health.records.script_records import (
    ScriptStarted,
    TrainingEvent,
    TrainingPlanned,
    WorkersEnded,
)
from slurm_health.system import journal
from slurm_health.system.processes import own_module
from slurm_health.torchrun.arguments import Arguments, Bounds
from slurm_health.torchrun.check import checked, member_of, say, without_secret
from slurm_health.torchrun.place import TaskPlace, named, place_among, single, torchrun_line
from slurm_health.torchrun.process import TorchrunEnd, run_torchrun
from slurm_health.torchrun.step import Begun, Follower, Leader, Unheard
from slurm_health.training.monitor.agent import TRAINING

# The job's own interpreter runs it, and need not have slurm-health installed.
_TORCHRUN = str(Path(__file__).with_name("quiet_torchrun.py"))
_JOURNAL_S = 10.0  # for what takes milliseconds on a filesystem that is well
_POLL_S = 0.5  # of the monitor, if there is no other process to follow
# Of a filesystem that one node does not reach. Other errors are the same on all nodes that share
# it, and one of them reports it.
_OF_ONE_NODE = {None, errno.EIO, errno.ENOTCONN, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT}


class Training:
    """The starts of a training, as this process takes part in them."""

    def __init__(
        self,
        python: str,
        arguments: Arguments,
        environ: Mapping[str, str],
        place: TaskPlace | None,
    ) -> None:
        """Decide how this process takes part, by its command line and its place among others.

        Args:
            python: the job's interpreter.
            arguments: of the command.
            environ: of this process.
            place: of this process, None if it has nothing to do with any other.

        Raises:
            UsageError: more nodes are asked for than there are.
        """
        self._python, self._arguments, self._environ = python, arguments, environ
        self._place = place or single(environ, host=socket.gethostname(), now_s=int(time.time()))
        nnodes, count = arguments.nnodes, len(self._place.nodes)
        # Each node trains for itself.
        self._alone = arguments.trains_alone or (place is None and nnodes is None)
        self._known = place is not None and not self._alone
        self._monitored = _is_to_watch(self._place, arguments, environ)
        if self._monitored and not self._alone and "SLURM_JOB_ID" not in environ:
            self._monitored = False  # no srun starts agents on the other nodes
            if arguments.text("monitor") is not None:
                say("this training is not watched: of several nodes, those of a Slurm job are")
        # The processes of all nodes meet if there is something to decide together.
        decides = arguments.checks or self._monitored or arguments.max_restarts
        self._meets = bool(self._known and arguments.meets_by_itself and decides)
        any_or_all = Bounds(least=count if self._known else 1, most=count)
        self._within = nnodes if self._known and nnodes is not None else any_or_all
        if self._within.least > count:
            raise UsageError(f"--nnodes={self._within.text}: there are fewer nodes here: {count}")
        self._own = without_secret(environ)  # of the workers
        self._own.pop(TRAINING, None)  # of a training around this one
        if arguments.text("heartbeat") != Heartbeat.OFF.value:
            self._own |= heartbeat_environ(environ)
        self._checking = arguments  # with what is to be checked before a restart
        self._directory: Path | None = None  # of the first check in the journal
        self._addresses: dict[str, str] = {}
        self._hangs: tuple[TrainingEvent, ...] = ()

    def run(self) -> int:
        """Train; return the code to end with.

        Raises:
            SlurmHealthError: the surroundings or the journal cannot be used.
        """
        place = self._place
        everyone = place.nodes
        if place.meeting is not None and place.leads:
            place = named(place)
        name, checks, restart = place.start, self._arguments.checks, 0
        while True:
            with contextlib.ExitStack() as stack:
                member, start = self._begin(stack, place, everyone, checks=checks)
                if isinstance(start, int):
                    return start
                if place.node not in start.nodes:
                    return _left_out(place, start.left_out.get(place.node, "not needed"), start)
                nodes = tuple(start.nodes)
                self._addresses |= start.addresses
                if self._alone and place.nodes[1:]:  # the others have failures of their own
                    name, self._directory = f"{place.start}.{place.node}", None
                    place, checks = replace(place, nodes=(place.node,), start=name), False
                    continue
                if nodes[0] != place.nodes[0]:  # another process leads from here on
                    place = place_among(place, nodes, self._addresses, f"{place.start}.0")
                    checks = False
                    continue
                place = replace(place, nodes=nodes)
                ended = self._train(place, everyone, member, restart)
                if ended.interrupted == signal.SIGINT:
                    raise KeyboardInterrupt
                if ended.interrupted:
                    raise SystemExit(ended.code)
                if member is not None and not ended.code:
                    member.finish()
                if not ended.code or (member is None and not self._alone):
                    return ended.code
                restart += 1
                plan = self._plan(place, member, ended, restart)
            if plan.plan not in ("restart", "check"):
                return 1 if ended.stopped else ended.code
            if place.node not in plan.nodes:
                return _left_out(place, "it is at fault", plan)
            checks = plan.plan == "check"
            if checks:
                from slurm_health.torchrun.restarts import for_restart

                self._checking = for_restart(self._arguments, self._directory)
            self._within = Bounds(least=self._least(place), most=len(plan.nodes))
            place = place_among(place, tuple(plan.nodes), self._addresses, f"{name}.{restart}")

    def _begin(
        self,
        stack: contextlib.ExitStack,
        place: TaskPlace,
        everyone: tuple[str, ...],
        *,
        checks: bool,
    ) -> tuple[Leader | Follower | None, TrainingPlanned | int]:
        """Begin a start, as a member of it if that is possible; return who trains, or the code."""
        unchecked = place.nodes[: self._within.most]
        all_train = TrainingPlanned(plan="start", nodes=list(unchecked))
        if not checks and not self._meets:
            return None, all_train
        own = member_of(place, everyone, self._arguments, self._environ, checks=checks)
        try:
            member = stack.enter_context(own)
            if not checks:
                return member, all_train
            self._directory = self._directory or member.directory
            return member, self._checked(member)
        except (JournalError, ChannelError) as err:
            if checks:
                needed = self._within.least == len(place.nodes) and place.meeting is None
                if isinstance(err, ChannelError) or not needed:
                    raise  # the others may go on without this node
                if _is_to_report(err, place):
                    say(f"{place.node}: UNCHECKED: {err}; starting the training anyway")
            return None, all_train

    def _least(self, place: TaskPlace) -> int:
        """Return with how few nodes the training goes on."""
        fixed = self._within.least == self._within.most
        return len(place.nodes) if fixed and not self._alone else self._within.least

    def _checked(self, member: Leader | Follower) -> TrainingPlanned | int:
        """Return the nodes that train, or the code to end with, as `checked`."""
        arguments, environ, place = self._checking, self._environ, member.place
        try:
            return checked(member, self._within, arguments, self._python, environ)
        except Begun as begun:
            say(f"{place.node}: the training has begun; checking this node alone before it joins")
            here = single(environ, host=socket.gethostname(), now_s=int(time.time()))
            here = replace(here, nodes=(place.node,), node=place.node)
            with member_of(here, here.nodes, arguments, environ, checks=True) as alone:
                own = checked(alone, Bounds(least=1, most=1), arguments, self._python, environ)
            if isinstance(own, TrainingPlanned) and own.reason:  # the others train well without it
                say(f"the training is NOT joined by a node in doubt ({own.reason})")
                return ExitCode.BAD_NODES
            joined = msgspec.structs.replace(begun.planned, nodes=list(place.nodes))
            return own if isinstance(own, int) else joined

    def _train(
        self,
        place: TaskPlace,
        everyone: tuple[str, ...],
        member: Leader | Follower | None,
        restart: int,
    ) -> TorchrunEnd:
        """Run torchrun, until workers end here or elsewhere, or hang."""
        own = dict(self._own)
        # Workers would find what those before them left in torchrun's store, such as old addresses.
        own.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        count = RESTART_COUNT.decode()
        own[count] = str(int(own.get(count, "0")) + restart)
        monitor: tuple[str, ...] = ()
        if self._monitored and place.leads:
            # Another step of the job may be another training.
            which = [f"--step={own['SLURM_STEP_ID']}"] if "SLURM_STEP_ID" in own else []
            if self._alone:
                own[TRAINING] = secrets.token_hex(8)  # marks the training's processes
                which = [f"--training={own[TRAINING]}", f"--node={place.node}"]
            monitor = own_module(
                "slurm_health.training.monitor.watch",
                f"--directory={self._directory or ''}",
                f"--on-hang={self._arguments.on_hang}",
                f"--after-s={AFTER_S:g}",
                "--tell",
                *which,
            )
        line = torchrun_line(
            self._arguments,
            place if self._known else None,
            everyone,
            self._addresses,
            self._environ,
            ours=member is not None or self._alone,
        )

        def is_over() -> bool:
            with contextlib.suppress(JournalError):  # a training does not end for that
                return member is not None and member.workers_ended()
            return False

        seconds = member.seldom_s if member is not None and place.nodes[1:] else _POLL_S
        show_life = (lambda: None) if member is None else member.show_life
        argv = [self._python, _TORCHRUN, *line]
        return run_torchrun(argv, own, monitor, is_over, seconds, show_life)

    def _plan(
        self, place: TaskPlace, member: Leader | Follower | None, ended: TorchrunEnd, restart: int
    ) -> TrainingPlanned:
        """Return what follows the end of the workers on all nodes."""
        end = WorkersEnded(node=place.node, exit_code=ended.code or 1, output=ended.output)
        most, least = self._arguments.max_restarts, self._least(place)
        if isinstance(member, Follower):
            if (plan := member.follow_up(end)) is not None:
                return plan
            rest = place.nodes[1:]
            lost = f"{place.nodes[0]} does not answer any more"
            if restart > most or len(rest) < least:
                say(f"the training ends: {lost}")
                return TrainingPlanned(plan="stop")
            if rest[0] == place.node:
                then = f"checking {fold(rest)} before the workers start"
                say(f"{lost}; {then} (restart {restart} of {most})")
            return TrainingPlanned(plan="check", nodes=list(rest))
        hangs = self._hangs
        self._hangs += (ended.hang,) if ended.hang is not None else ()

        def decided(reports: Sequence[WorkersEnded], silent: int) -> TrainingPlanned:
            from slurm_health.torchrun.restarts import Failure, decide  # the others wait already

            failure = Failure(
                place=place if member is None else member.place,
                arguments=self._arguments,
                directory=self._directory,
                restart=restart,
                least=least,
                ended=ended,
                hangs_before=hangs,
            )
            return decide(failure, reports, silent, self._own)

        return decided([end], 0) if member is None else member.follow_up(end, place.nodes, decided)


def _left_out(place: TaskPlace, why: str, planned: TrainingPlanned) -> int:
    say(f"{place.node} is LEFT OUT: {why}; training goes on with {fold(planned.nodes)}")
    return ExitCode.HEALTHY


def _is_to_report(err: JournalError, place: TaskPlace) -> bool:
    """Return whether this process is the one of the step that reports why nothing was checked."""
    if isinstance(err, Unheard):
        return place.node == place.nodes[1]  # the first one cannot
    return place.leads or getattr(err.__cause__, "errno", None) in _OF_ONE_NODE


def _is_to_watch(place: TaskPlace, arguments: Arguments, environ: Mapping[str, str]) -> bool:
    """Return whether the training is to have a monitor: a job of `sbatch` has its own."""
    if arguments.on_hang == OnHang.OFF.value or "SLURM_JOB_ID" not in environ:
        return arguments.on_hang != OnHang.OFF.value
    root = config.journal_root(arguments.text("journal"), environ)
    try:
        journal.await_answer(root, _JOURNAL_S)
        runs = journal.runs_of(root, place.cluster, str(place.array or place.job_id))
        return not any(
            isinstance(entry.record, ScriptStarted)
            for run in runs
            if (journal.attempt_and_check(run.name) or (-1,))[0] == place.attempt
            for entry in journal.read_all(run, journal.SUPERVISOR)
        )
    except (JournalError, OSError):
        return True
