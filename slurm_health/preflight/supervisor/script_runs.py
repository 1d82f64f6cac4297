# SPDX-License-Identifier: Apache-2.0
"""The script, as often as it is started: recorded, followed by a post-mortem if it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from slurm_health.preflight.supervisor import post_mortem
from slurm_health.preflight.supervisor.check_process import HARMLESS
from slurm_health.preflight.supervisor.monitor_process import Monitoring
from slurm_health.preflight.supervisor.recorder import ScriptRecorder, say
from slurm_health.preflight.supervisor.script_process import ScriptProcess, end_script, end_steps
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.records.records import Action, ActionDone, Disposition, JobOutcome
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system.signals import FOR_SCRIPT, signal_name

# How often this attempt of the job has started the script again.
RESTART_COUNT = b"SLURM_HEALTH_RESTART_COUNT"
# With these a person, a limit or Slurm ends a job: what they have ended is not started again.
_ENDING = ALL_SIGNALS - FOR_SCRIPT - HARMLESS
_SOON_S = 0.5  # within this of the script's end, the signal that ended its steps is here too


class Watching(Protocol):
    """Has one run of the script watched."""

    def __call__(self, *, environ: Mapping[bytes, bytes]) -> AbstractContextManager[Monitoring]:
        """Return a context in which it is."""
        ...


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often the script may be started again after a failure, and what decides about it.

    `argv` is the command, without what it is told of the failure. With `survives` the job was
    submitted so that it survives the loss of a node.
    """

    most: int = 0
    argv: Sequence[str] = ()
    survives: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptExit:
    """How the script ended at last, as a wait status; `leaves`: Slurm moves the job elsewhere."""

    status: int
    leaves: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptRuns:
    """Starts the script, and starts it again as far as that is allowed and makes sense.

    Args:
        source: the file that Slurm runs, in which the script stands.
        name: what the user calls it.
        environ: the environment that Slurm gave the job.
        mask: the signals that are blocked in the script.
        directory: of the run in the journal, empty where there is none.
        recorder: writes there.
        restarts: how often it may be started again.
        ask: asks what follows a failure; raises Interrupted.
        watched: has a run of the script, in its environment, watched while active.
        trap_wait_s: see `ScriptProcess`.
        post_mortem_s: how long a post-mortem may take; 0: there is none.
    """

    source: Path
    name: str
    environ: Mapping[bytes, bytes]
    mask: Collection[int]
    directory: str
    recorder: ScriptRecorder
    restarts: Restarts
    ask: Callable[[Sequence[str]], JobOutcome | None]
    watched: Watching
    trap_wait_s: float
    post_mortem_s: float
    _told: set[int] = field(default_factory=set)

    def run(self, argv: list[bytes], answer: JobOutcome) -> ScriptExit:
        """Run the script to its last end, on the nodes of an answer.

        Raises:
            Interrupted: a signal came while it was decided whether to start it again.
            OSError: it cannot be started.
        """
        restart = 0
        while True:
            environ = self._environ_of(answer, restart)
            with (
                self._spares_kept(answer.spares),
                self._batch_node_watched((*answer.nodes, *answer.spares)),
                self.watched(environ=environ) as monitoring,
            ):
                ended = self._run_once(argv, environ, answer, restart, monitoring)
            status = ended.status
            if status == 0 and not self._told_to_end():
                return ScriptExit(status=status)
            if status and self.restarts.most:
                self._told.update(_heard_within(_SOON_S))
            said, signalled = self._post_mortem(ended, environ)
            if status == 0:
                return ScriptExit(status=status)
            if said:
                say(said)
            if signalled or self._not_again(restart):
                return ScriptExit(status=status)
            restart += 1
            following = self._asked(answer, restart)
            if following is None or following.disposition is Disposition.STOP:
                return ScriptExit(status=status)
            if following.leaves:
                return ScriptExit(status=status, leaves=True)
            answer = following
            on = f" on {','.join(answer.nodes)}" if answer.nodes else ""
            times = f"restart {restart} of {self.restarts.most}"
            say(f"starting {self.name} again{on} ({times}): {answer.reason}")

    @contextlib.contextmanager
    def _spares_kept(self, nodes: Sequence[str]) -> Iterator[None]:
        """Keep the script's steps off spare nodes, where there are any."""
        if not nodes:
            yield
            return
        from slurm_health.preflight.supervisor.kept_spares import KeptSpares

        spares = KeptSpares(nodes, self.environ, self.mask)
        for node, why in spares.not_held.items():
            say(f"the spare {node} is not kept free of the script's steps: {why}")
        try:
            yield
        finally:
            spares.end()

    @contextlib.contextmanager
    def _batch_node_watched(self, nodes: Sequence[str]) -> Iterator[None]:
        """Have another node listen whether this one lives, if the job survives its loss."""
        if not self.restarts.survives:
            yield
            return
        from slurm_health.preflight.supervisor import batch_node_watch

        with batch_node_watch.beside(nodes, self.environ, self.mask):
            yield

    def _run_once(
        self,
        argv: list[bytes],
        environ: Mapping[bytes, bytes],
        answer: JobOutcome,
        restart: int,
        monitoring: Monitoring,
    ) -> post_mortem.EndedScript:
        """Run the script; return how it ended."""
        began = time.monotonic()
        begins = [_size(number) for number in (1, 2)]
        process = ScriptProcess(argv, environ=environ, mask=self.mask, trap_wait_s=self.trap_wait_s)
        if process.early:
            names = ", ".join(map(signal_name, sorted(process.early)))
            say(
                f"{names} came before {self.name} started; it is sent once the script has a trap"
                f" for it, or after {self.trap_wait_s:g} s"
            )
        self.recorder.start(
            ScriptStarted(
                script=self.name, pid=process.pid, restart=restart, nodes=list(answer.nodes)
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
        self._told.update(process.told & _ENDING)
        ended_s, duration_s = time.time(), time.monotonic() - began
        self._record_end(status, duration_s)
        return post_mortem.EndedScript(
            status=status,
            name=self.name,
            source=str(self.source),
            directory=self.directory,
            ended_s=round(ended_s, 3),
            duration_s=round(duration_s, 3),
            output_from=tuple(begins),
        )

    def _record_end(self, status: int, duration_s: float) -> None:
        if not self.recorder.wait():
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        self.recorder.start(
            ScriptEnded(exit_code=code, signal=number, duration_s=round(duration_s, 3))
        )
        self.recorder.wait()

    def _told_to_end(self) -> bool:
        """Tell whether a script that ended well was told to end, as those of ended jobs are.

        Where Slurm's signal has not come here yet, its line stands in the job's output.
        """
        if self._told or not self.post_mortem_s:
            return bool(self._told)
        from slurm_health.system.slurm import last_word  # not needed before the end

        text = {os.fsdecode(name): os.fsdecode(value) for name, value in self.environ.items()}
        return last_word.ends_in_output(text, now_s=time.time())

    def _post_mortem(
        self, ended: post_mortem.EndedScript, environ: Mapping[bytes, bytes]
    ) -> tuple[str, bool]:
        """Hold a post-mortem; return what there is to say of it, and whether a signal came.

        Slurm signals the processes of a job one after another: that which ended the script may come
        here, or to what looks into its end, only now, and does not end that.
        """
        if not self.post_mortem_s:
            return "", False

        def hold(told_to_end: bool) -> str:
            told = msgspec.structs.replace(ended, told_to_end=told_to_end)
            return post_mortem.hold(
                told.command, environ=environ, mask=self.mask, limit_s=self.post_mortem_s
            )

        said = hold(bool(self._told) or ended.status == 0)
        if said != post_mortem.ENDED_BY_SIGNAL:
            return said, False
        if not self._told and _as_if_ended(ended.status):
            said = hold(True)
        return said, True

    def _not_again(self, restart: int) -> bool:
        """Tell whether the script is not to be started again, whatever made it fail; say why."""
        if not self.restarts.most:
            return True
        why = ""
        if self._told:
            names = ", ".join(map(signal_name, sorted(self._told)))
            why = f"the job was sent {names}"
        elif restart >= self.restarts.most:
            times = "once" if restart == 1 else f"{restart} times"
            why = f"it has been {times} (--max-restarts)"
        elif not self.directory:
            why = "there is no journal of the job, in which its failure would be recorded"
        if why:
            say(f"{self.name} is not started again: {why}")
        return bool(why)

    def _asked(self, answer: JobOutcome, restart: int) -> JobOutcome | None:
        """Ask what follows the failure."""
        failed = {
            "directory": self.directory,
            "restart": restart,
            "max_restarts": self.restarts.most,
            "batch_node": os.fsdecode(self.environ.get(b"SLURMD_NODENAME", b"")),
            "nodes": answer.nodes,
            "spares": answer.spares,
        }
        told = f"--after-failure={msgspec.json.encode(failed).decode()}"
        following = self.ask([*self.restarts.argv, told])
        if following is None:
            say(f"{self.name} is not started again: whether to could not be decided")
        elif following.disposition is Disposition.STOP:
            say(f"{self.name} is not started again: {following.reason}")
        return following

    def _environ_of(self, answer: JobOutcome, restart: int) -> Mapping[bytes, bytes]:
        """Return the environment of a start of the script on the nodes of an answer."""
        environ = dict(self.environ)
        if self.restarts.most:
            environ[RESTART_COUNT] = str(restart).encode()
        if answer.nodes:
            from slurm_health.preflight.supervisor import kept_spares

            text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
            new = kept_spares.resized_environ(text, answer.nodes)
            environ |= {os.fsencode(name): os.fsencode(value) for name, value in new.items()}
        return environ


def _as_if_ended(status: int) -> bool:
    """Tell whether a script ended as one does whose job is ended: a shell ends with 128 + n."""
    signals = (signal.SIGTERM, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) in signals
    return os.WEXITSTATUS(status) in {0, *(128 + number for number in signals)}


def _heard_within(wait_s: float) -> set[int]:
    """Return the ending signals that have come, or come within a moment."""
    heard: set[int] = set()
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        info = signal.sigtimedwait(_ENDING, left_s)
        if info is None:
            break
        heard.add(info.si_signo)
    return heard


def _size(number: int) -> int:
    """Return how much has been written to one of our own streams; 0 where it is no file."""
    try:
        found = os.fstat(number)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
