# SPDX-License-Identifier: Apache-2.0
"""What Slurm runs as the batch script: the check first, then the user's script in its place.

To the script it is as if Slurm had started it: same environment, directory, limits, standard
streams, signals; and to Slurm as if this were the script: same exit code, or same signal. It
lives beside the training for days, so it loads next to nothing.
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

from slurm_health.preflight.supervisor import check_process, monitor_process, post_mortem
from slurm_health.preflight.supervisor.flight_recorder import recording
from slurm_health.preflight.supervisor.recorder import Clock, ScriptRecorder, say, to_machine_log
from slurm_health.preflight.supervisor.script_process import TRAP_WAIT_S, command_line
from slurm_health.preflight.supervisor.script_runs import Restarts, ScriptRuns
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, JobOutcome
from slurm_health.system import private_files
from slurm_health.system.signals import FOR_SCRIPT, signal_name


@dataclass(frozen=True, kw_only=True)
class SupervisorPatience:
    """How long the supervisor waits, and how often it tries."""

    master_starts: int = 2
    grace_s: float = 5.0  # for a check that has to end; Slurm kills 30 s after its signal
    silence_s: float = check_process.SILENCE_S
    requeue_wait_s: float = 90.0
    journal_wait_s: float = 10.0
    trap_wait_s: float = TRAP_WAIT_S
    post_mortem_s: float = post_mortem.POST_MORTEM_S
    monitor_after_s: float = monitor_process.AFTER_S


PATIENCE = SupervisorPatience()
NO_RESTARTS = Restarts()


def original_environ(environ_fd: int | None) -> dict[bytes, bytes]:
    """Return the environment that Slurm gave to the batch script.

    The launcher hands over the kernel's copy of it as an open file; a shell drops variables whose
    names it cannot use, and Python may add LC_CTYPE. Without that file, ours is the best there is.
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
    """What is run in place of a batch script: a check, and then the script.

    `source` holds the script, which begins on line `line`; the user calls it `name`; it gets
    `arguments` and `environ`. The last line that `check_argv` prints says what becomes of the job.
    If it never does, the same with `--unchecked=HOW` behind it records that and how, and says it
    instead. `unchecked_runs` says whether the script runs if not even that could be done; without
    `checked` it runs at once, and after `limit_s` without an answer. With `quiet` nothing is added
    to the script's output: what there is to say goes to the machine's log. `monitor` is what is
    done about a script that hangs; `flight_recorder` whether its PyTorch records collectives;
    `heartbeat` whether its ranks get one. One that fails may be started again (`restarts`).
    """

    source: Path
    line: int
    name: str
    arguments: Sequence[str]
    check_argv: Sequence[str]
    environ: Mapping[bytes, bytes]
    unchecked_runs: bool = True
    checked: bool = True
    quiet: bool = False
    limit_s: float = math.inf
    restarts: Restarts = NO_RESTARTS
    monitor: str = monitor_process.OFF
    flight_recorder: bool = False
    heartbeat: bool = False


def supervise(
    config: SupervisorConfig, *, clock: Clock = time.time, patience: SupervisorPatience = PATIENCE
) -> int:
    """Run the check, and then, if it says so, the script.

    Returns the exit code; ends by a signal where the script alone would have.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child can be waited for
    try:
        check = _Check(config.environ, mask, patience, clock, config.limit_s)
        with to_machine_log() if config.quiet else contextlib.nullcontext():
            answer = _answered(config, check)
        if answer.disposition is Disposition.STOP:
            say(f"the job stops: {answer.reason}")
            return answer.exit_code or ExitCode.BAD_NODES
        if answer.leaves:
            return _await_requeue(patience.requeue_wait_s)
    except check_process.Interrupted as interrupted:
        return _die_by(interrupted.number)
    recorder = ScriptRecorder(answer.directory, clock, patience.journal_wait_s)
    runs = _script_runs(config, answer.directory, recorder, check, mask, patience)
    try:
        script = unpacked(config.source, config.line)
        with private_files.temporary("slurm_script", script, mode=0o700) as path:
            over = runs.run(command_line(script, path, config.arguments), answer)
        if over.leaves:
            return _await_requeue(patience.requeue_wait_s)
    except check_process.Interrupted as interrupted:
        return _die_by(interrupted.number)
    except OSError as err:
        # slurmstepd too ends with the number of the error.
        say(f"cannot run {config.name}: {err}")
        return err.errno or ExitCode.UNAVAILABLE
    status = over.status
    if os.WIFSIGNALED(status):
        return _die_by(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _script_runs(
    config: SupervisorConfig,
    directory: str,
    recorder: ScriptRecorder,
    check: _Check,
    mask: Collection[int],
    patience: SupervisorPatience,
) -> ScriptRuns:
    """Return what runs the script, as often as it is restarted."""
    return ScriptRuns(
        source=config.source,
        name=config.name,
        environ=_environ_of_script(config, directory, patience.journal_wait_s),
        mask=mask,
        directory=directory,
        recorder=recorder,
        restarts=config.restarts,
        ask=check.after_failure,
        watched=functools.partial(
            monitor_process.beside,
            config.monitor,
            directory=directory,
            script_source=config.source,
            mask=mask,
            after_s=patience.monitor_after_s,
        ),
        trap_wait_s=patience.trap_wait_s,
        post_mortem_s=0.0 if config.quiet else patience.post_mortem_s,
    )


def _answered(config: SupervisorConfig, check: _Check) -> JobOutcome:
    """Return what becomes of the job, once it is checked."""
    if not config.checked:
        return JobOutcome(disposition=Disposition.PROCEED, exit_code=ExitCode.HEALTHY)
    return (
        check.answer(config.check_argv)
        or check.answer_to_death(config.check_argv)
        or _without_answer(config.unchecked_runs)
    )


class _Check:
    """The check, started as often as it takes."""

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
        self._said: JobOutcome | None = None
        self._failure = ""
        self._out_of_time = False

    def answer(self, argv: Sequence[str]) -> JobOutcome | None:
        """Return what the check says; None where it never does.

        One that dies or hangs is begun again, once; what it has done already it does not do twice.
        """
        for start in range(1, self._patience.master_starts + 1):
            answer = self._ask(argv)
            if answer is not None or self._out_of_time:
                return answer
            starts = f"start {start} of {self._patience.master_starts} of the check"
            say(f"{starts}: {self._failure}")
        return None

    def answer_to_death(self, argv: Sequence[str]) -> JobOutcome | None:
        """Have it recorded that the check died; return what becomes of the job, None if unsaid."""
        how = f"the check was started {self._patience.master_starts} times, and {self._failure}"
        if self._out_of_time:
            how = f"the check had not ended when its time was over: {self._failure}"
            self._end_s = math.inf
        answer = self._ask([*argv, f"--unchecked={how}"])
        if answer is None:
            say(f"that could not be recorded: {self._failure}")
        return answer

    def after_failure(self, argv: Sequence[str]) -> JobOutcome | None:
        """Ask what becomes of a job whose script has failed; None where that is not said."""
        self._said, self._end_s = None, math.inf
        answer = self._ask(argv, again=True)
        if answer is None:
            say(f"after the failure: {self._failure}")
        return answer

    def _ask(self, argv: Sequence[str], *, again: bool = False) -> JobOutcome | None:
        try:
            answer = check_process.ask(
                argv,
                environ=self._environ,
                mask=self._mask,
                grace_s=self._patience.grace_s,
                silence_s=self._patience.silence_s,
                limit_s=self._end_s - time.monotonic(),
                interrupted=functools.partial(
                    _say_why_interrupted,
                    said=self._said,
                    after="so the script is not started again"
                    if again
                    else "so the script did not run",
                    environ=self._environ,
                    clock=self._clock,
                ),
            )
        except (check_process.NoAnswer, OSError) as failure:
            if isinstance(failure, check_process.NoAnswer):
                self._said = failure.said
            self._out_of_time = isinstance(failure, check_process.OutOfTime)
            self._failure = str(failure)
            return None
        if answer.disposition is Disposition.PROCEED and answer.exit_code and not again:
            # With nodes, it goes on without the bad ones.
            anyway = "" if answer.nodes else " anyway"
            say(f"running the script{anyway}: {answer.reason}")
        return answer


def _without_answer(unchecked_runs: bool) -> JobOutcome:
    """Return what becomes of a job whose check cannot even say that it failed."""
    reason = "the check never answered; the lines above say more"
    if unchecked_runs:
        say(f"running the script anyway: UNCHECKED: {reason}")
        return JobOutcome(disposition=Disposition.PROCEED, exit_code=ExitCode.HEALTHY)
    reason = f"UNCHECKED: {reason} (--on-unchecked)"
    return JobOutcome(disposition=Disposition.STOP, exit_code=ExitCode.UNAVAILABLE, reason=reason)


def _say_why_interrupted(
    interrupted: check_process.Interrupted,
    *,
    said: JobOutcome | None,
    after: str,
    environ: Mapping[bytes, bytes],
    clock: Clock,
) -> None:
    """Say what ended the check, and what to do if it was the job's time limit.

    Slurm is asked, for a moment only: it kills us seconds after its signal.

    Where the job leaves its nodes the check has said so, and Slurm's signal is no news; nor is it
    where the check that was started before has `said` so, and died when it had asked Slurm.
    """
    answer = interrupted.answer or said
    if answer is not None and answer.leaves:
        return
    end_s = environ.get(b"SLURM_JOB_END_TIME", b"")
    over = end_s.isdigit() and clock() >= int(end_s)
    from slurm_health.system.slurm import last_word  # needed by few jobs

    became = "" if over else last_word.became(_as_text(environ), now_s=clock())
    if over or became == last_word.TIME_LIMIT:
        say(
            f"the job's time limit ended the check, {after}; ask for more time"
            " (--time): the check counts against it"
        )
        return
    if became:
        say(f"{became} during its check, {after}")
        return
    what = f"{signal_name(interrupted.number)} ended the check, {after}"
    if not end_s.isdigit():  # Slurm 22.05 does not tell it
        what += "; if that was for the time limit (--time): the check counts against it"
    say(what)


def _as_text(environ: Mapping[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def _as_bytes(environ: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}


def _await_requeue(wait_s: float) -> int:
    """Wait for Slurm to end this attempt of the job, of which the check has said why."""
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
    """Return the environment of the script. The journal has `limit_s` to answer."""
    environ = config.environ
    if config.flight_recorder:
        with to_machine_log() if config.quiet else contextlib.nullcontext():
            new = recording(_as_text(environ), directory, limit_s=limit_s)
        environ = {**environ, **_as_bytes(new)}
    if config.heartbeat:
        environ = {**environ, **_as_bytes(monitor_process.heartbeat_environ(_as_text(environ)))}
    return environ


def unpacked(source: Path, line: int) -> bytes:
    """Take the script out of the launcher, in which it begins on a line.

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
