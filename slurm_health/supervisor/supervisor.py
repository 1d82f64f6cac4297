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
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health import journal, private_files
from slurm_health.core.records import Record, ScriptEnded, ScriptStarted
from slurm_health.errors import ExitCode, JournalError
from slurm_health.processes import fork, signal_name
from slurm_health.supervisor import check_process, monitor_process, post_mortem
from slurm_health.supervisor.check_process import Answer
from slurm_health.supervisor.script_process import (
    FOR_SCRIPT,
    TRAP_WAIT_S,
    ScriptProcess,
    command_line,
)
from slurm_health.supervisor.signal_witness import ALL_SIGNALS

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits, and how often it tries."""

    master_starts: int = 3
    grace_s: float = 5.0  # for a check that is told to end; Slurm kills 30 s after its signal
    silence_s: float = check_process.SILENCE_S
    requeue_wait_s: float = 90.0
    journal_wait_s: float = 10.0
    trap_wait_s: float = TRAP_WAIT_S
    post_mortem_s: float = post_mortem.POST_MORTEM_S
    monitor_after_s: float = monitor_process.AFTER_S


PATIENCE = Patience()


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


def supervise(
    *,
    script_source: Path,
    script_line: int,
    script_name: str,
    arguments: Sequence[str],
    check_argv: Sequence[str],
    record_argv: Sequence[str],
    environ: Mapping[bytes, bytes],
    unchecked_runs: bool = True,
    monitor: str = monitor_process.OFF,
    clock: Clock = time.time,
    patience: Patience = PATIENCE,
) -> int:
    """Run the check, and then, if it says so, the script that `script_source` holds.

    It begins on line `script_line`; the user calls it `script_name`; it gets `environ`. The last
    line that `check_argv` prints says what becomes of the job. Where it never does, `record_argv`
    with `--unchecked=HOW` behind it records that and how, and says it instead. `unchecked_runs`
    says whether the script runs where not even that could be done; `monitor` what is done about a
    script that hangs. Returns the exit code; ends by a signal where the script alone would have.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child can be waited for
    try:
        check = _Check(environ, mask, patience, clock)
        answer = (
            check.answer(check_argv)
            or check.answer_to_death(record_argv)
            or _without_answer(unchecked_runs)
        )
        if answer.disposition == "stop":
            _say(f"the job stops: {answer.reason}")
            return answer.exit_code or ExitCode.BAD_NODES
        if answer.leaves:
            return _await_requeue(patience.requeue_wait_s)
    except check_process.Interrupted as interrupted:
        return _die_by(interrupted.number)
    recorder = _Recorder(answer.run_directory, clock, patience.journal_wait_s)
    environ = _for_nodes(environ, answer.nodes)
    try:
        script = _unpacked(script_source, script_line)
        with private_files.temporary("slurm_script", script, mode=0o700) as path:
            argv = command_line(script, path, arguments)
            began = time.monotonic()
            with monitor_process.beside(
                monitor,
                directory=answer.run_directory,
                environ=environ,
                mask=mask,
                after_s=patience.monitor_after_s,
            ):
                wait_s = patience.trap_wait_s
                status = _run_script(argv, environ, mask, script_name, recorder, wait_s)
    except OSError as err:
        # slurmstepd too ends with the number of the error.
        _say(f"cannot run {script_name}: {err}")
        return err.errno or ExitCode.UNAVAILABLE
    if status:
        command = post_mortem.command(
            status,
            script_source=script_source,
            script_name=script_name,
            directory=answer.run_directory,
            duration_s=time.monotonic() - began,
        )
        said = post_mortem.hold(command, environ=environ, mask=mask, limit_s=patience.post_mortem_s)
        if said:
            _say(said)
    if os.WIFSIGNALED(status):
        return _die_by(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


class _Check:
    """The check, started as often as it takes."""

    def __init__(
        self,
        environ: Mapping[bytes, bytes],
        mask: Collection[int],
        patience: Patience,
        clock: Clock,
    ) -> None:
        self._environ = environ
        self._mask = mask
        self._patience = patience
        self._clock = clock
        self._said: Answer | None = None
        self._failure = ""

    def answer(self, argv: Sequence[str]) -> Answer | None:
        """Return what the check says; None where it never does.

        One that dies or hangs is started again: it goes on from its journal.
        """
        for start in range(1, self._patience.master_starts + 1):
            answer = self._ask(argv)
            if answer is not None:
                return answer
            starts = f"start {start} of {self._patience.master_starts} of the check"
            _say(f"{starts}: {self._failure}")
        return None

    def answer_to_death(self, argv: Sequence[str]) -> Answer | None:
        """Have it recorded that the check died; return what becomes of the job, None if unsaid."""
        how = f"the check was started {self._patience.master_starts} times, and {self._failure}"
        answer = self._ask([*argv, f"--unchecked={how}"])
        if answer is None:
            _say(f"that could not be recorded: {self._failure}")
        return answer

    def _ask(self, argv: Sequence[str]) -> Answer | None:
        try:
            answer = check_process.ask(
                argv,
                environ=self._environ,
                mask=self._mask,
                grace_s=self._patience.grace_s,
                silence_s=self._patience.silence_s,
                interrupted=functools.partial(
                    _say_why_interrupted,
                    said=self._said,
                    environ=self._environ,
                    clock=self._clock,
                ),
            )
        except (check_process.NoAnswer, OSError) as failure:
            if isinstance(failure, check_process.NoAnswer):
                self._said = failure.said
            self._failure = str(failure)
            return None
        if answer.disposition == "proceed" and answer.exit_code:
            # With nodes, it goes on without the bad ones.
            anyway = "" if answer.nodes else " anyway"
            _say(f"running the script{anyway}: {answer.reason}")
        return answer


def _without_answer(unchecked_runs: bool) -> Answer:
    """Return what becomes of a job whose check cannot even say that it failed."""
    reason = "the check never answered; the lines above say more"
    if unchecked_runs:
        _say(f"running the script anyway: UNCHECKED: {reason}")
        return Answer(disposition="proceed")
    reason = f"UNCHECKED: {reason} (--on-unchecked)"
    return Answer(disposition="stop", exit_code=ExitCode.UNAVAILABLE, reason=reason)


def _say_why_interrupted(
    interrupted: check_process.Interrupted,
    *,
    said: Answer | None,
    environ: Mapping[bytes, bytes],
    clock: Clock,
) -> None:
    """Say what ended the check, and what to do if it was the job's time limit.

    Where the job leaves its nodes the check has said so, and Slurm's signal is no news; nor is it
    where the check that was started before has `said` so, and died when it had asked Slurm.
    """
    answer = interrupted.answer or said
    if answer is not None and answer.leaves:
        return
    end_s = environ.get(b"SLURM_JOB_END_TIME", b"")
    if end_s.isdigit() and clock() >= int(end_s):
        _say(
            "the job's time limit ended the check, so the script did not run; ask for more time"
            " (--time): the check counts against it"
        )
        return
    what = f"{signal_name(interrupted.number)} ended the check, so the script did not run"
    if not end_s.isdigit():  # Slurm 22.05 does not tell it
        what += "; if that was for the time limit (--time): the check counts against it"
    _say(what)


def _for_nodes(environ: Mapping[bytes, bytes], nodes: Sequence[str]) -> Mapping[bytes, bytes]:
    """Return the script's environment for a job that has given nodes back."""
    if not nodes:
        return environ
    from slurm_health.core.acting import resized_environ

    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    new = resized_environ.changes(text, nodes)
    return {**environ, **{os.fsencode(name): os.fsencode(value) for name, value in new.items()}}


def _await_requeue(wait_s: float) -> int:
    """Wait for Slurm to end this attempt of the job, of which the check has said why."""
    deadline = time.monotonic() + wait_s
    while (remaining := deadline - time.monotonic()) > 0:
        info = signal.sigtimedwait(ALL_SIGNALS - FOR_SCRIPT, remaining)
        if info is not None and info.si_signo not in check_process.HARMLESS:
            raise check_process.Interrupted(info.si_signo)
    _say(f"Slurm has not requeued the job within {wait_s:g} s; it ends here, submit it again")
    return 1


class _Recorder:
    """Writes to the journal from a child, because a filesystem that hangs must not hang us."""

    def __init__(self, directory: str, clock: Clock, wait_s: float) -> None:
        self._directory = directory
        self._clock = clock
        self._wait_s = wait_s
        self._child = 0

    def start(self, record: Record) -> None:
        """Begin to append a record."""
        if self._directory:
            with contextlib.suppress(OSError):
                self._child = fork(lambda: self._append(record))

    def ended(self) -> bool:
        """Tell whether nothing is being written."""
        if self._child and os.waitpid(self._child, os.WNOHANG)[0]:
            self._child = 0
        return self._child == 0

    def wait(self) -> bool:
        """Tell whether the record was dealt with in time; its writer is given up if not."""
        deadline = time.monotonic() + self._wait_s
        while not self.ended():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                os.kill(self._child, signal.SIGKILL)
                _say(f"journal {self._directory}: its filesystem does not answer")
                return False
            signal.sigtimedwait({signal.SIGCHLD}, remaining)
        return True

    def _append(self, record: Record) -> int:
        """Append a record; a failure is a line on standard error and nothing more."""
        try:
            journal.Writer(Path(self._directory), journal.SUPERVISOR, self._clock).append(record)
        except JournalError as err:
            _say(str(err))
        return 0


def _run_script(
    argv: list[bytes],
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    name: str,
    recorder: _Recorder,
    trap_wait_s: float,
) -> int:
    """Run the script with its two records in the journal; return its wait status."""
    began = time.monotonic()
    process = ScriptProcess(argv, environ=environ, mask=mask, trap_wait_s=trap_wait_s)
    if process.early:
        names = ", ".join(map(signal_name, sorted(process.early)))
        _say(
            f"{names} came before {name} started; it is sent once the script has a trap for it,"
            f" or after {trap_wait_s:g} s"
        )
    recorder.start(ScriptStarted(script=name, pid=process.pid))
    status = process.wait(recorder.ended)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if recorder.wait():
        code = 128 + number if number else os.WEXITSTATUS(status)
        duration_s = round(time.monotonic() - began, 3)
        recorder.start(ScriptEnded(exit_code=code, signal=number, duration_s=duration_s))
        recorder.wait()
    return status


def _unpacked(source: Path, line: int) -> bytes:
    """Take the script out of the launcher."""
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


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it is gone
        print(f"slurm-health: {text}", file=sys.stderr, flush=True)
