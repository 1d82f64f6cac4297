# SPDX-License-Identifier: Apache-2.0
"""Beside the user's script: `python -m slurm_health.training.monitor.watch`, until the script ends.

The supervisor starts it beside its script, and `run` beside its torchrun. It waits some seconds,
because most scripts that fail do so soon, and then starts an agent on every node. Reports and the
job's output go to the `Pulse`. When a training is due, all agents inspect it twice, and a hang is
reported. The watch ends with its standard input, and ends all its processes. A script whose watch
cannot start, or dies, runs on unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.preflight.supervisor.monitor_process import SCRIPT_HANGS
from slurm_health.records.allocation import from_environ
from slurm_health.records.errors import AllocationError, SlurmError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.script_records import EventKind, ProgressSeen
from slurm_health.records.text import duration_text
from slurm_health.system import WATCHED
from slurm_health.system.processes import Process
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import NodeStates, SlurmView
from slurm_health.training.diagnosis.output_lines import first_non_finite
from slurm_health.training.diagnosis.pace import PaceAnalysis, PaceFinding, speeds_of
from slurm_health.training.diagnosis.pulse import LIMITS, Program, Pulse
from slurm_health.training.diagnosis.samples import (
    STOPPED,
    NodeReport,
    Standstill,
    addresses_of,
    shared_end,
)
from slurm_health.training.monitor.agent import TRAINING
from slurm_health.training.monitor.agents import (
    Agents,
    ScriptOver,
    start_here,
    start_in_job,
)
from slurm_health.training.monitor.messages import INSPECT, REACH, STATE
from slurm_health.training.monitor.output_files import Tails, script_text

if TYPE_CHECKING:
    from slurm_health.training.monitor.events import Events

_TICK_S = 2.0
_OUTPUT_S = 10.0  # from one reading of the output to the next
_WINDOW_S = 20.0  # in which ranks are compared with each other, and steps with earlier ones
_PATHS_S = 15.0  # some steps of several seconds
# From one record of the progress to the next: a hundredth of the time so far within these limits,
# so that a progress bar moves, and a day has some 1,700 records of 200 bytes.
_SOONEST_S, _LATEST_S, _OF_THE_TIME = 5.0, 60.0, 1 / 100
_WARN_S = 60.0  # until a warning about missing heartbeats and py-spy
_MOST_STOPPED = 64  # named ranks
_THIRDS = 3  # nodes that try the ends of a broken path
_AGAIN_S = 5.0  # until the next inspection if some agents were late
_SLURM_S = 5.0  # the timeout of a question about the job's nodes
_END_OF_STEPS_S = 5.0  # between the end of a job's steps and that of its script


class SlurmJob:
    """The job of an environment, or the one step of it that is named.

    Raises:
        AllocationError: the job cannot be read.
        ValueError: the nodes of the step are unknown.
    """

    def __init__(
        self, environ: Mapping[str, str], options: argparse.Namespace, began_s: float
    ) -> None:
        allocation = from_environ(environ)
        of_step = environ.get("SLURM_STEP_NODELIST") if options.step else None
        self.nodes: Sequence[str] = expand(of_step) if of_step else allocation.nodes
        self.here = environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self._environ = environ
        self._number = allocation.job_id
        self._name = allocation.array or str(allocation.job_id)
        own = Path(WATCHED, f"{os.getuid()}.{allocation.job_id}")
        self._sign = None if options.step else own
        self._options = (
            f"--node={self.here}",
            f"--step={options.step}",
            f"--began-s={began_s:.3f}",
            f"--scale={options.scale:g}",
        )

    def start(self, nodes: Sequence[str]) -> Process:
        """Start the agents of some nodes; raises OSError."""
        if list(nodes) == [self.here]:
            return start_here([f"--job={self._number}", *self._options], self._environ)
        return start_in_job(self._number, nodes, self._options, self._environ)

    def show(self, text: str) -> None:
        """Leave the job's progress for root's health check, in the agent's mark of life."""
        if self._sign is None:
            return
        with contextlib.suppress(OSError):  # the agent has not made it, or cannot
            how = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self._sign, how), "w") as file:
                file.write(text)

    def left_of(self, nodes: Sequence[str]) -> Sequence[str]:
        """Return the nodes that the job still has, none if it has ended, all if Slurm is silent."""
        try:
            job = Client.for_hook(self._environ, limit_s=_SLURM_S).job(self._name)
        except (SlurmError, ValueError):  # no answer, or one that cannot be read
            return nodes
        return [node for node in nodes if job.states == {"RUNNING"} and node in job.nodes]

    def states(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return Slurm's states of some nodes, nothing if it is silent."""
        try:
            shown = Client.for_hook(self._environ, limit_s=_SLURM_S).nodes(nodes)
        except (SlurmError, ValueError):
            return {}
        return {name: node.state for name, node in shown.items()}


class LocalTraining:
    """A training on this node alone, whose processes have a mark."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self.here: str = options.node
        self.nodes: Sequence[str] = [options.node]
        self._environ = environ
        self._options = (
            f"--job={options.training}",
            f"--variable={TRAINING}",
            f"--node={options.node}",
            f"--began-s={time.time():.3f}",
            f"--scale={options.scale:g}",
        )

    def start(self, _: Sequence[str]) -> Process:
        """Start the agent; raises OSError."""
        return start_here(self._options, self._environ)

    def show(self, _: str) -> None:
        """Leave nothing: there is no job."""

    def left_of(self, nodes: Sequence[str]) -> Sequence[str]:
        """Return all of them: no Slurm takes any away."""
        return nodes

    def states(self, _: Sequence[str]) -> dict[str, str]:
        """Return nothing: there is no Slurm."""
        return {}


class Watch:
    """Follows one training until its script ends.

    Args:
        job: the watched job.
        tails: its output.
        events: reports, records and acts.
        scale: of all times, for a rehearsal in which time is compressed.
    """

    def __init__(
        self,
        job: SlurmJob | LocalTraining,
        tails: Tails,
        events: Events,
        scale: float = 1.0,
    ) -> None:
        self._job = job
        self._tails = tails
        self._events = events
        self._scale = scale
        self._pulse = Pulse(job.nodes, LIMITS.scaled(scale))
        self._pace = PaceAnalysis()
        self._agents = Agents(job.start, self._observe, 0)
        self._began_s = self._window_s = time.monotonic()
        self._output_s = self._recorded_s = float("-inf")
        self._recorded: ProgressSeen | None = None
        self._warned = False
        self._awaited: set[str] = set()  # files on servers that ranks have waited for
        self._waits = ""  # what the last inspection showed, if it was no hang

    def run(self) -> None:
        """Watch.

        Raises:
            ScriptOver: the script has ended.
            ScriptToEnd: the script hangs, and has to be ended.
            OSError: the agents cannot be started.
        """
        try:
            own = [node for node in self._job.nodes if node == self._job.here]
            others = [node for node in self._job.nodes if node not in own]
            for nodes in filter(None, (own, others)):
                self._agents.begin(nodes)
            while self._agents.nodes:
                self._agents.receive(self._scale * _TICK_S)
                self._replace_agents()
                self._read_output()
                now_s = time.monotonic()
                for resumed in self._pulse.resumed(now_s):
                    self._events.resumed(resumed)
                if now_s - self._window_s >= _WINDOW_S:
                    self._window_s = now_s
                    for finding in self._pace.close_window(self._pulse.programs.values()):
                        slower = finding.event is EventKind.SLOWDOWN
                        self._events.pace(self._with_speeds(finding) if slower else finding)
                self._record_progress(now_s)
                program = self._pulse.due(now_s)
                if program is not None:
                    self._inspect(program)
        finally:
            self._agents.end()

    def _observe(self, report: NodeReport) -> None:
        self._pulse.observe(report, time.monotonic())

    def _replace_agents(self) -> None:
        """Start agents that have ended again, except on nodes that the job has lost."""
        silent = self._agents.nodes_without_report()
        if not self._agents.is_time_to_replace(silent):
            return
        # At a job's end its steps may end before its script does, which is normal.
        if _script_ends_within(_END_OF_STEPS_S):
            raise ScriptOver
        left = self._job.left_of(silent)
        lost = [node for node in silent if node not in left]
        if lost:
            self._agents.drop(lost)
            self._pulse.nodes = self._agents.nodes
            if self._agents.nodes:
                self._events.say(f"Slurm took {fold(lost)} out of the job; it watches the rest")
        if left:
            self._events.say(f"the agent on {fold(left)} ended; it is started again")
            try:
                self._agents.replace(left)
            except OSError as err:
                self._events.say(f"it cannot be started: {err}")

    def _read_output(self) -> None:
        now_s = time.monotonic()
        if now_s - self._output_s < self._scale * _OUTPUT_S:
            return
        self._output_s = now_s
        for written in self._tails.written():
            loss = self._pulse.read(written.file, written.text, now_s, torn=written.torn)
            if loss is not None:
                first = first_non_finite(self._tails.backwards(written.file)) or loss.first
                self._events.pace(msgspec.structs.replace(loss, first=first))

    def _inspect(self, program: Program) -> None:
        """Have all agents inspect their ranks, twice; report a hang of the program."""
        reports = self._agents.ask(INSPECT)
        silent = self._agents.nodes_without_report()
        self._output_s = float("-inf")
        self._read_output()
        now_s = time.monotonic()
        if not reports or program.name not in self._pulse.programs:
            self._pulse.put_off(program, now_s)
            return
        if set(self._agents.nodes) - {*reports, *silent}:  # a busy agent is late, or silent soon
            self._pulse.put_off(program, now_s, self._scale * _AGAIN_S)
            return
        standstill = self._pulse.judge(program, reports, now_s, silent)
        self._waits = standstill.why_not
        if standstill.why_not:
            awaited = {rank.storage for rank in standstill.ranks if rank.storage}
            if awaited - self._awaited:  # each file once
                self._awaited |= awaited
                self._events.say(f"paused for {standstill.stalled_s:.0f} s: {standstill.why_not}")
            return
        wanted = [node for node in self._agents.nodes if node not in silent]
        standstill = self._with_reached(standstill, reports, wanted)
        reports = self._agents.ask(STATE, wanted)
        states = [reports[node].state for node in wanted if node in reports]
        data: list[msgspec.Struct] = [NodeStates(nodes=tuple(filter(None, states)))]
        if silent:
            data.append(SlurmView(node_states=self._job.states(silent)))
        self._events.hang(standstill, data)

    def _with_reached(
        self, standstill: Standstill, reports: Mapping[str, NodeReport], asked: Sequence[str]
    ) -> Standstill:
        """Have third nodes try both ends of a broken path, unless others show whose fault it is."""
        ends, _ = shared_end(standstill.paths)
        owners = addresses_of(ends, reports)
        thirds = [node for node in asked if node not in ends][:_THIRDS]
        if len(ends) < 2 or {*owners.values()} != {*ends} or not thirds:
            return standstill
        word = b" ".join((REACH, *(text.encode() for text in (",".join(thirds), *owners))))
        answers = self._agents.ask(word, thirds)
        reached = {
            node: tuple(dict.fromkeys(owners[address] for address in answers[node].reached or ()))
            for node in thirds
            if node in answers
        }
        return msgspec.structs.replace(standstill, reached=reached)

    def _with_speeds(self, finding: PaceFinding) -> PaceFinding:
        """Measure the speeds of connections for a while."""
        before = self._agents.ask(INSPECT)
        self._agents.receive(_PATHS_S)
        after = self._agents.ask(INSPECT)
        speeds = speeds_of(
            {node: report.sent for node, report in before.items()},
            {node: report.sent for node, report in after.items()},
            {address: node for node, report in after.items() for address in report.addresses},
            self._agents.nodes,
        )
        return msgspec.structs.replace(finding, nodes=self._agents.nodes, speeds=speeds)

    def _record_progress(self, now_s: float) -> None:
        """Record the progress at times, or at once if a rank is stopped or resumed.

        Warn once if the job can show neither heartbeats nor stacks.
        """
        samples = [s for program in self._pulse.programs.values() for s in program.samples]
        alive = [sample for sample in samples if not sample.gone]
        if not any(program.pause_s for program in self._pulse.programs.values()):
            self._waits = ""  # they make progress
        saved = self._pulse.saved
        stopped = sorted({(s.rank, s.node) for s in alive if s.state == STOPPED})[:_MOST_STOPPED]
        ages_s = [sample.age_s for sample in alive if sample.steps]
        line = self._pulse.line
        since_s = now_s - self._began_s
        if alive and not self._warned and since_s > _WARN_S:
            from slurm_health.training.monitor.voices import find_py_spy

            self._warned = True
            if not ages_s and find_py_spy() is None:
                self._events.say(
                    "the ranks have no heartbeat, and there is no py-spy: the place of a hang may"
                    " stay unknown (--heartbeat=auto, pip install 'slurm-health[diagnosis]')"
                )
        progress = ProgressSeen(
            node=self._job.here,
            ranks=len(alive),
            stopped=[rank for rank, _ in stopped],
            stopped_on=list(dict.fromkeys(node for _, node in stopped)),
            step=self._pulse.step,
            line=line.line if line else "",
            age_s=round(min(ages_s) if ages_s else now_s - line.last_s if line else 0.0, 1),
            beating=bool(ages_s),
            saved=saved.saved if saved else "",
            saved_age_s=round(now_s - saved.saved_s, 1) if saved else 0.0,
            waits=self._waits,
        )
        before = self._recorded
        news = before is None or any(
            getattr(before, name) != getattr(progress, name)
            for name in ("stopped", "beating", "saved", "waits")
        )
        pause_s = self._scale * _LATEST_S
        if before is not None and before.step != progress.step:
            pause_s = min(max(self._scale * _SOONEST_S, _OF_THE_TIME * since_s), pause_s)
        if news or now_s - self._recorded_s >= pause_s:
            before_s = self._recorded_s
            self._recorded, self._recorded_s = progress, now_s
            self._events.record(progress, lossy=True)
            steps = progress.step - before.step if before and before.step else 0
            pace = f"{duration_text((now_s - before_s) / steps)} a step" if steps > 0 else ""
            parts = (f"step {progress.step}" if progress.step else "", pace, progress.waits)
            ago = f"checkpoint {duration_text(progress.saved_age_s)} ago" if progress.saved else ""
            self._job.show(", ".join(filter(None, (*parts, ago))))


def _script_ends_within(wait_s: float) -> bool:
    return bool(select.select([0], [], [], wait_s)[0])


def main() -> int:
    """Watch until the script has ended; 0 unless it has to be ended because it hangs."""
    parser = argparse.ArgumentParser(prog="slurm_health.training.monitor.watch")
    parser.add_argument("--directory", default="")
    parser.add_argument("--on-hang", default="report")
    parser.add_argument("--after-s", type=float, required=True)
    parser.add_argument("--script-source", type=Path)
    parser.add_argument("--step", default="")  # the only watched one, on its nodes
    parser.add_argument("--tell", action="store_true")  # print the hang
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--quiet", action="store_true")  # add nothing to the job's output
    # A training on this node alone: the mark of its processes.
    parser.add_argument("--training", default="")
    parser.add_argument("--node", default="")
    options = parser.parse_args()
    # Slurm's signals to all processes of the job are for the script; we end when it does.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    began_s = time.time()
    if _script_ends_within(options.after_s):
        return 0
    # Not before: a script of seconds has no use for it.
    from slurm_health.training.monitor.events import Events, ScriptToEnd, acting

    environ = dict(os.environ)
    if options.training:  # not the whole of a job, if it is in one
        ours = "SLURM_HEALTH_"
        environ = {n: v for n, v in environ.items() if n.startswith(ours) or n[:5] != "SLURM"}
    directory = Path(options.directory) if options.directory else None
    out = None if options.quiet else sys.stderr
    events = Events(directory, environ, out, on_hang=acting(options.on_hang, environ))
    try:
        own = options.training
        job = LocalTraining(options, environ) if own else SlurmJob(environ, options, began_s)
    except (AllocationError, ValueError) as err:
        events.say(f"not running: {err}")
        return 0
    try:
        tails = Tails(script_text(options.script_source), Path.cwd(), environ)
        Watch(job, tails, events, options.scale).run()
    except ScriptOver:
        pass
    except ScriptToEnd as ends:
        if options.tell:
            os.write(1, msgspec.json.encode(ends.hang))
        return SCRIPT_HANGS
    except Exception as err:  # a boundary: a traceback would pass for one of the job's
        why = err.strerror if isinstance(err, OSError) else f"{type(err).__name__}: {err}"
        events.say(f"the watch has ended: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
