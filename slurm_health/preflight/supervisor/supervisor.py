# SPDX-License-Identifier: Apache-2.0
"""The process that Slurm runs as the batch script: the check first, then the user's script.

The script runs exactly as Slurm would start it: same environment, directory, limits, standard
streams, signals. Slurm sees the script's exit status, or its signal. The process lives beside the
training for days, so it loads next to nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import resource
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.preflight.decide.policy import FlightRecorder, Heartbeat, OnHang, OnUnchecked
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.supervisor import check_process, monitor_process, post_mortem
from slurm_health.preflight.supervisor.environ import as_bytes, as_text
from slurm_health.preflight.supervisor.flight_recorder import recording
from slurm_health.preflight.supervisor.recorder import Clock, ScriptRecorder, say, to_machine_log
from slurm_health.preflight.supervisor.script_process import command_line
from slurm_health.preflight.supervisor.script_runs import ScriptRuns
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, JobOutcome
from slurm_health.records.script_records import TIME_LIMIT
from slurm_health.system import private_files
from slurm_health.system.signals import FOR_SCRIPT, signal_name


@dataclass(frozen=True, kw_only=True)
class SupervisorPatience:
    """The time limits and retries of the supervisor."""

    master_starts: int = 2
    grace_s: float = 5.0  # for a check to end; Slurm kills 30 s after its signal
    silence_s: float = check_process.SILENCE_S
    requeue_wait_s: float = 90.0
    journal_wait_s: float = 10.0
    post_mortem_s: float = post_mortem.POST_MORTEM_S
    monitor_after_s: float = monitor_process.AFTER_S
    unasked_after_s: float = 60.0  # of a script whose user has not asked to have it watched


PATIENCE = SupervisorPatience()
_TELL_S = 10.0  # for a message to the owner


def original_environ(environ_fd: int | None) -> dict[bytes, bytes]:
    """Return the environment that Slurm gave to the batch script.

    The launcher passes the kernel's copy of it as an open file: a shell drops variables whose names
    it cannot use, and Python may add LC_CTYPE. Without that file, ours is the next best.
    """
    data = b""
    if environ_fd is not None:
        with contextlib.suppress(OSError), os.fdopen(environ_fd, "rb") as file:
            data = file.read()
    environ: dict[bytes, bytes] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if name and equals:
            environ.setdefault(name, value)
    return environ or dict(os.environb)


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What runs in place of a batch script: a check, and then the script.

    Args:
        source: the file with the script.
        line: the line on which the script begins.
        arguments: of the script.
        check_argv: the command of the check; its last line is the outcome of the job. If there is
            none, the same command with `--unchecked=HOW` records that, and prints the outcome.
        restart_argv: the command that decides after a failure, without its option about that.
        environ: of the script.
        spec: what was asked for the job.
        checked: without it the script runs at once.
        quiet: add nothing to the script's output; our messages go to the machine's log.
        limit_s: the time limit of the check; the script runs after it.
    """

    source: Path
    line: int
    arguments: Sequence[str]
    check_argv: Sequence[str]
    restart_argv: Sequence[str]
    environ: Mapping[bytes, bytes]
    spec: JobSpec
    checked: bool = True
    quiet: bool = False
    limit_s: float = math.inf


def supervise(
    config: SupervisorConfig, *, clock: Clock = time.time, patience: SupervisorPatience = PATIENCE
) -> int:
    """Run the check, and then, unless it stops the job, the script.

    Returns the exit code; ends by a signal if the script alone would have.
    """
    spec = config.spec
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while ignored, it leaves no child to wait for
    try:
        check = _Check(config.environ, mask, patience, clock, config.limit_s)
        with to_machine_log() if config.quiet else contextlib.nullcontext():
            if config.checked:
                runs_anyway = spec.on_unchecked is OnUnchecked.PROCEED
                answer = check.answer(config.check_argv, unchecked_runs=runs_anyway)
            else:
                answer = JobOutcome(disposition=Disposition.PROCEED, exit_code=ExitCode.HEALTHY)
        if answer.disposition is Disposition.STOP:
            say(f"the job stops: {answer.reason}")
            from slurm_health.system import owner  # few jobs need it

            environ = as_text(config.environ)
            owner.tell("stopped", "stops before its script", answer.reason, environ, wait_s=_TELL_S)
            return answer.exit_code or ExitCode.BAD_NODES
        if answer.leaves:
            return _await_requeue(patience.requeue_wait_s)
    except check_process.Interrupted as interrupted:
        return _die_by(interrupted.number)
    after_s = patience.unasked_after_s if config.quiet else patience.monitor_after_s
    watched = not config.quiet or spec.monitor is not OnHang.OFF
    runs = ScriptRuns(
        source=config.source,
        spec=spec,
        environ=_environ_of_script(config, answer.directory, patience.journal_wait_s),
        mask=mask,
        directory=answer.directory,
        recorder=ScriptRecorder(answer.directory, clock, patience.journal_wait_s),
        restart_argv=config.restart_argv,
        ask=check.after_failure,
        watched=functools.partial(
            monitor_process.beside,
            spec.monitor.value,
            directory=answer.directory,
            script_source=config.source,
            mask=mask,
            after_s=after_s,
            quiet=config.quiet,
        ),
        post_mortem_s=patience.post_mortem_s if watched else 0.0,
        quiet_for_s=after_s if config.quiet else None,
    )
    try:
        script = unpacked(config.source, config.line)
        with private_files.temporary("slurm_script", script, mode=0o700) as path:
            ended = runs.run(command_line(script, path, config.arguments), answer)
        if ended.leaves:
            return _await_requeue(patience.requeue_wait_s)
    except check_process.Interrupted as interrupted:
        return _die_by(interrupted.number)
    except OSError as err:
        # slurmstepd also exits with the number of the error.
        say(f"cannot run {spec.script}: {err}")
        return err.errno or ExitCode.UNAVAILABLE
    status = ended.status
    if os.WIFSIGNALED(status):
        return _die_by(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


class _Check:
    """The check, with its retries."""

    def __init__(
        self,
        environ: Mapping[bytes, bytes],
        mask: Collection[int],
        patience: SupervisorPatience,
        clock: Clock,
        limit_s: float,
    ) -> None:
        self._end_s = time.monotonic() + limit_s
        self._environ = environ
        self._mask = mask
        self._patience = patience
        self._clock = clock
        self._last_answer: JobOutcome | None = None  # of a check that died
        self._failure = ""
        self._out_of_time = False

    def answer(self, argv: Sequence[str], *, unchecked_runs: bool) -> JobOutcome:
        """Return the outcome of the job by its check; one that dies or hangs begins again, once.

        Acts that it has recorded do not happen twice. If the last check dies, another command
        records that; if that fails too, `unchecked_runs` says whether the script runs.
        """
        starts = self._patience.master_starts
        for start in range(1, starts + 1):
            if (answer := self._ask(argv)) is not None:
                return answer
            if self._out_of_time:
                break
            say(f"start {start} of {starts} of the check: {self._failure}")
        how = f"the check was started {starts} times, and {self._failure}"
        if self._out_of_time:
            how = f"the check had not ended when its time was over: {self._failure}"
            self._end_s = math.inf
        if (answer := self._ask([*argv, f"--unchecked={how}"])) is not None:
            return answer
        say(f"that could not be recorded: {self._failure}")
        reason = f"UNCHECKED: {how}"
        if unchecked_runs:
            say(f"running the script anyway: {reason}")
            return JobOutcome(disposition=Disposition.PROCEED, exit_code=ExitCode.HEALTHY)
        return JobOutcome(
            disposition=Disposition.STOP,
            exit_code=ExitCode.UNAVAILABLE,
            reason=f"{reason} (--on-unchecked)",
        )

    def after_failure(self, argv: Sequence[str]) -> JobOutcome | None:
        """Return the outcome of a job whose script has failed; None without an answer."""
        self._last_answer, self._end_s = None, math.inf
        answer = self._ask(argv, again=True)
        if answer is None:
            say(f"after the failure: {self._failure}")
        return answer

    def _ask(self, argv: Sequence[str], *, again: bool = False) -> JobOutcome | None:
        effect = "so the script is not started again" if again else "so the script did not run"
        try:
            answer = check_process.ask(
                argv,
                environ=self._environ,
                mask=self._mask,
                grace_s=self._patience.grace_s,
                silence_s=self._patience.silence_s,
                limit_s=self._end_s - time.monotonic(),
                interrupted=functools.partial(self._explain_signal, effect=effect),
            )
        except (check_process.NoAnswer, OSError) as failure:
            if isinstance(failure, check_process.NoAnswer):
                self._last_answer = failure.answer
            self._out_of_time = isinstance(failure, check_process.OutOfTime)
            self._failure = str(failure)
            return None
        if answer.disposition is Disposition.PROCEED and answer.exit_code and not again:
            # With nodes, the job leaves the bad ones.
            anyway = "" if answer.nodes else " anyway"
            say(f"running the script{anyway}: {answer.reason}")
        return answer

    def _explain_signal(self, interrupted: check_process.Interrupted, *, effect: str) -> None:
        """Say which signal ended the check, and what to do if it was the job's time limit.

        Slurm has a moment to answer: it kills us seconds after its signal. A job that leaves its
        nodes expects the signal, by this answer of the check or by that of one that died.
        """
        answer = interrupted.answer or self._last_answer
        if answer is not None and answer.leaves:
            return
        end_s = self._environ.get(b"SLURM_JOB_END_TIME", b"")
        over = end_s.isdigit() and self._clock() >= int(end_s)
        from slurm_health.system.slurm import last_word  # few jobs need it

        environ = as_text(self._environ)
        became = "" if over else last_word.became(environ, now_s=self._clock())
        if over or became == TIME_LIMIT:
            say(
                f"the job's time limit ended the check, {effect}; ask for more time"
                " (--time): the check counts against it"
            )
        elif became:
            say(f"{became} during its check, {effect}")
        else:
            what = f"{signal_name(interrupted.number)} ended the check, {effect}"
            if not end_s.isdigit():  # as on Slurm 22.05
                what += "; if that was for the time limit (--time): the check counts against it"
            say(what)


def _await_requeue(wait_s: float) -> int:
    """Wait for Slurm to end this attempt of the job; the check has printed why."""
    deadline = time.monotonic() + wait_s
    while (remaining := deadline - time.monotonic()) > 0:
        info = signal.sigtimedwait(ALL_SIGNALS - FOR_SCRIPT, remaining)
        if info is not None and info.si_signo not in check_process.HARMLESS:
            raise check_process.Interrupted(info.si_signo)
    say(f"Slurm has not requeued the job within {wait_s:g} s; it ends here, submit it again")
    return 1


def _environ_of_script(
    config: SupervisorConfig, directory: str, limit_s: float
) -> Mapping[bytes, bytes]:
    """Return the environment of the script; the journal has `limit_s` to answer."""
    environ = config.environ
    if config.spec.flight_recorder is FlightRecorder.ON:
        with to_machine_log() if config.quiet else contextlib.nullcontext():
            new = recording(as_text(environ), directory, limit_s=limit_s)
        environ = {**environ, **as_bytes(new)}
    if config.spec.heartbeat is Heartbeat.AUTO and config.spec.monitor is not OnHang.OFF:
        environ = {**environ, **as_bytes(monitor_process.heartbeat_environ(as_text(environ)))}
    return environ


def unpacked(source: Path, line: int) -> bytes:
    """Return the script from the launcher, in which it begins on a line.

    Raises:
        OSError: it cannot be read, or is too short.
    """
    parts = source.read_bytes().split(b"\n", line - 1)
    if len(parts) < line:
        raise OSError(errno.EINVAL, f"fewer than {line} lines", str(source))
    return parts[-1]


def _die_by(number: int) -> int:
    """End by a signal, as the script did or would have, without a second core file."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS - {number})
    os.kill(os.getpid(), number)
    return 128 + number  # only if it is a signal that does not end a process
