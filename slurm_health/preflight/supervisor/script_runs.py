# SPDX-License-Identifier: Apache-2.0
"""The starts of the script: recorded, followed by a post-mortem if it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.supervisor import post_mortem
from slurm_health.preflight.supervisor.check_process import HARMLESS
from slurm_health.preflight.supervisor.environ import as_bytes, as_text
from slurm_health.preflight.supervisor.monitor_process import Monitoring
from slurm_health.preflight.supervisor.recorder import ScriptRecorder, say, tell
from slurm_health.preflight.supervisor.script_process import ScriptProcess, end_script, end_steps
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.records.records import Action, ActionDone, Disposition, JobOutcome
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system.signals import FOR_SCRIPT, signal_name

# How often this attempt of the job has started the script again.
RESTART_COUNT = b"SLURM_HEALTH_RESTART_COUNT"
# A user, a limit or Slurm ends jobs with these: after one of them the script is not started again.
_ENDING = ALL_SIGNALS - FOR_SCRIPT - HARMLESS
_SOON_S = 0.5  # the signal that ended the script's steps arrives here within this of its end


@dataclass(frozen=True, kw_only=True)
class ScriptExit:
    """The wait status of the script's last start; `leaves`: Slurm moves the job elsewhere."""

    status: int
    leaves: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptRuns:
    """Starts the script, and starts it again as far as that is allowed and makes sense.

    Args:
        source: the file that Slurm runs, which contains the script.
        spec: what was asked for the job.
        environ: the environment that Slurm gave the job.
        mask: the signals that are blocked in the script.
        directory: of the run in the journal, empty without one.
        recorder: writes there.
        restart_argv: the command that decides after a failure, without its option about that.
        ask: returns what follows a failure; raises Interrupted.
        watched: watches a start of the script, in its environment, while active.
        post_mortem_s: the time limit of a post-mortem; 0: there is none.
        quiet_for_s: nothing is added to the job's output, and a script that ends within this time
            has no post-mortem; None: its user has asked for both.
    """

    source: Path
    spec: JobSpec
    environ: Mapping[bytes, bytes]
    mask: Collection[int]
    directory: str
    recorder: ScriptRecorder
    restart_argv: Sequence[str]
    ask: Callable[[Sequence[str]], JobOutcome | None]
    watched: Callable[..., AbstractContextManager[Monitoring]]
    post_mortem_s: float
    quiet_for_s: float | None = None
    _ended_by: set[int] = field(default_factory=set)  # the ending signals that have arrived

    def run(self, argv: list[bytes], answer: JobOutcome) -> ScriptExit:
        """Run the script, on the nodes of an answer, until it does not start again.

        Raises:
            Interrupted: a signal arrived during the decision on another start.
            OSError: it cannot be started.
        """
        restart = 0
        while True:
            environ = self._environ_of(answer, restart)
            with contextlib.ExitStack() as beside:
                if answer.spares:  # keep the script's steps off them
                    from slurm_health.preflight.supervisor.kept_spares import KeptSpares

                    spares = KeptSpares(answer.spares, self.environ, self.mask)
                    beside.callback(spares.end)
                    for node, why in spares.not_held.items():
                        say(f"the spare {node} is not kept free of the script's steps: {why}")
                if self.spec.keeps_spares:  # another node watches whether this one is alive
                    from slurm_health.preflight.supervisor import batch_node_watch

                    nodes = (*answer.nodes, *answer.spares)
                    beside.enter_context(batch_node_watch.beside(nodes, self.environ, self.mask))
                monitoring = beside.enter_context(self.watched(environ=environ))
                ended = self._run_once(argv, environ, answer, restart, monitoring)
            status = ended.status
            if status == 0 and not self._ended_from_outside():
                return ScriptExit(status=status)
            if status and self.spec.max_restarts:
                deadline = time.monotonic() + _SOON_S
                while (left_s := deadline - time.monotonic()) > 0:
                    if (info := signal.sigtimedwait(_ENDING, left_s)) is not None:
                        self._ended_by.add(info.si_signo)
            problem, signalled = self._post_mortem(ended, environ)
            if status == 0:
                return ScriptExit(status=status)
            if problem:
                tell(problem, quiet=self.quiet_for_s is not None)
            following = None
            if self.spec.max_restarts and not signalled:
                following = self._next_start(answer, restart)
            if following is None or following.leaves:
                return ScriptExit(status=status, leaves=following is not None)
            answer = following
            restart += 1
            on = f" on {','.join(answer.nodes)}" if answer.nodes else ""
            times = f"restart {restart} of {self.spec.max_restarts}"
            say(f"starting {self.spec.script} again{on} ({times}): {answer.reason}")

    def _environ_of(self, answer: JobOutcome, restart: int) -> Mapping[bytes, bytes]:
        """Return the environment of a start of the script on the nodes of an answer."""
        environ = dict(self.environ)
        if self.spec.max_restarts:
            environ[RESTART_COUNT] = str(restart).encode()
        if answer.nodes:
            from slurm_health.preflight.supervisor import kept_spares

            environ |= as_bytes(kept_spares.resized_environ(as_text(environ), answer.nodes))
        return environ

    def _run_once(
        self,
        argv: list[bytes],
        environ: Mapping[bytes, bytes],
        answer: JobOutcome,
        restart: int,
        monitoring: Monitoring,
    ) -> post_mortem.EndedScript:
        """Run the script to its end, and record both ends."""
        began = time.monotonic()
        begins = [_size(number) for number in (1, 2)]
        process = ScriptProcess(argv, environ=environ, mask=self.mask)
        if process.early:
            names = ", ".join(map(signal_name, sorted(process.early)))
            say(f"{names} arrived before {self.spec.script} started, and is not passed on")
        self.recorder.start(
            ScriptStarted(
                script=self.spec.script, pid=process.pid, restart=restart, nodes=list(answer.nodes)
            )
        )
        hung = False

        def on_child() -> None:
            nonlocal hung
            self.recorder.ended()
            if not hung and monitoring.script_hangs():
                hung = True
                end_script(process.pid)

        status = process.wait(on_child)
        if hung:
            end_steps(environ, self.mask)
            if self.recorder.wait():
                self.recorder.start(ActionDone(action=Action.END_SCRIPT, succeeded=True))
        self._ended_by.update(process.received & _ENDING)
        ended_s, duration_s = time.time(), round(time.monotonic() - began, 3)
        if self.recorder.wait():
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            code = 128 + number if number else os.WEXITSTATUS(status)
            self.recorder.start(ScriptEnded(exit_code=code, signal=number, duration_s=duration_s))
            self.recorder.wait()
        return post_mortem.EndedScript(
            status=status,
            name=self.spec.script,
            source=str(self.source),
            directory=self.directory,
            ended_s=round(ended_s, 3),
            duration_s=duration_s,
            output_from=tuple(begins),
            quiet=self.quiet_for_s is not None,
        )

    def _ended_from_outside(self) -> bool:
        """Return whether a script that ended well was ended like those of cancelled jobs.

        If Slurm's signal has not arrived here yet, its line is in the job's output.
        """
        if self._ended_by or not self.post_mortem_s:
            return bool(self._ended_by)
        from slurm_health.system.slurm import last_word  # not needed before the end

        return last_word.ends_in_output(as_text(self.environ), now_s=time.time())

    def _post_mortem(
        self, ended: post_mortem.EndedScript, environ: Mapping[bytes, bytes]
    ) -> tuple[str, bool]:
        """Run a post-mortem; return what went wrong with it, and whether a signal arrived.

        Slurm signals the processes of a job one after another: the signal that ended the script may
        reach us, or the post-mortem, only now, and must not end that.
        """
        if not self.post_mortem_s or ended.duration_s < (self.quiet_for_s or 0.0):
            return "", False

        def run(ended_from_outside: bool) -> str:
            script = msgspec.structs.replace(ended, told_to_end=ended_from_outside)
            return post_mortem.run(
                script.command, environ=environ, mask=self.mask, limit_s=self.post_mortem_s
            )

        problem = run(bool(self._ended_by) or ended.status == 0)
        if problem != post_mortem.ENDED_BY_SIGNAL:
            return problem, False
        # The script of an ended job ends by one of these signals; a shell ends with 128 + n.
        signals = {signal.SIGTERM, signal.SIGKILL}
        if os.WIFSIGNALED(ended.status):
            as_if_ended = os.WTERMSIG(ended.status) in signals
        else:
            as_if_ended = os.WEXITSTATUS(ended.status) in {0, *(128 + n for n in signals)}
        return run(True) if as_if_ended and not self._ended_by else problem, True

    def _next_start(self, answer: JobOutcome, restart: int) -> JobOutcome | None:
        """Return what follows a failure, None (and say why) if the script does not start again."""
        following = None
        if self._ended_by:
            why = f"the job was sent {', '.join(map(signal_name, sorted(self._ended_by)))}"
        elif restart >= self.spec.max_restarts:
            times = "once" if restart == 1 else f"{restart} times"
            why = f"it has been {times} (--max-restarts)"
        elif not self.directory:
            why = "there is no journal of the job, in which its failure would be recorded"
        else:
            failed = {
                "directory": self.directory,
                "restart": restart + 1,
                "max_restarts": self.spec.max_restarts,
                "batch_node": os.fsdecode(self.environ.get(b"SLURMD_NODENAME", b"")),
                "nodes": answer.nodes,
                "spares": answer.spares,
            }
            option = f"--after-failure={msgspec.json.encode(failed).decode()}"
            following = self.ask([*self.restart_argv, option])
            if following is not None and following.disposition is not Disposition.STOP:
                return following
            why = following.reason if following else "whether to could not be decided"
        say(f"{self.spec.script} is not started again: {why}")
        return None


def _size(number: int) -> int:
    """Return the size of one of our own streams; 0 if it is no file."""
    try:
        stream = os.fstat(number)
    except OSError:
        return 0
    return stream.st_size if stat.S_ISREG(stream.st_mode) else 0
