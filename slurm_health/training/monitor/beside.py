# SPDX-License-Identifier: Apache-2.0
"""What watches beside a training: `python -m slurm_health.training.monitor.beside`.

The supervisor starts it beside its script, and the torchrun that leads (`torchrun_nodes.Monitor`)
beside its workers; outside Slurm that tells it the nodes, too, and carries what they say. It waits
a while, because most scripts that fail do so soon, and until a process on this node has a
heartbeat. Then it starts one monitor per node and watches. Until then it follows the job's output
and whether the ranks here move; where that ends in the middle of a training, monitors look at its
processes for some seconds. It ends when its standard input does, and all that it started with it. A
script whose monitor cannot be started, or dies, runs on as it would.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_health.preflight.supervisor.monitor_process import SCRIPT_HANGS

if TYPE_CHECKING:
    from slurm_health.training.monitor.findings import WatchFindings
    from slurm_health.training.monitor.monitors import Monitors

# How often the batch host is looked at for a heartbeat, and the output for lines that count steps.
_LOOK_S = 20.0
_MOVE_S = 5.0  # from one look at whether ranks here move to the next
_SUSPENDED_S = 5.0  # more than that is no busy machine: the job was suspended
_SLURM_S = 5.0  # to say which nodes the job has
_END_OF_STEPS_S = 5.0  # between the end of a job's steps and that of its script
_LOOKS_AT_END = 6


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is watched: `mark` is what `variable` is in the environment of all its processes.

    `start` has all nodes look, and `left_of` tells which of its nodes the job still has. Where it
    is one step of a job, that is `only_step`.
    """

    variable: str
    mark: str
    here: str
    nodes: Sequence[str]
    start: Callable[[Sequence[str]], Monitors]
    left_of: Callable[[Sequence[str]], Sequence[str]]
    only_step: str = ""


def main() -> int:
    """Watch until the script has ended; 0 whatever was found."""
    parser = argparse.ArgumentParser(prog="slurm_health.training.monitor.beside")
    parser.add_argument("--directory", default="")
    parser.add_argument("--on-hang", default="report")
    parser.add_argument("--after-s", type=float, required=True)
    parser.add_argument("--script-source", type=Path)
    parser.add_argument("--step", default="")  # which alone is watched, on its nodes
    parser.add_argument("--tell", action="store_true")  # the hang, on standard output
    # Where a training is not a job: what marks its processes, where monitors are read and told.
    parser.add_argument("--training", default="")
    parser.add_argument("--node", default="")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--reading", type=int, default=-1)
    parser.add_argument("--writing", type=int, default=-1)
    options = parser.parse_args()
    # What Slurm sends to every process of the job is for the script; we end when it does.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not _script_ends_within(options.after_s):
        directory = Path(options.directory) if options.directory else None
        from slurm_health.training.monitor.output_files import script_text

        script = script_text(options.script_source)
        environ = _without_slurm(os.environ) if options.training else dict(os.environ)
        job = _carried(options) if options.training else _of_slurm(environ, options.step)
        if job is not None:
            return _watch(job, directory, script, environ, options.on_hang, tell=options.tell)
    return 0


def _of_slurm(environ: Mapping[str, str], step: str) -> _Job | None:
    """Return the job that this environment is of, or its `step`; None where it cannot be read."""
    from slurm_health.records.allocation import from_environ
    from slurm_health.records.errors import AllocationError
    from slurm_health.records.nodeset import expand
    from slurm_health.system.processes import NOTHING, PIPE, start_tied
    from slurm_health.training.monitor.monitors import Monitors
    from slurm_health.training.monitor.node import JOB

    try:
        allocation = from_environ(environ)
        of_step = environ.get("SLURM_STEP_NODELIST") if step else None
        its_nodes = expand(of_step) if of_step else allocation.nodes
    except (AllocationError, ValueError) as err:
        _say(f"monitor: not running: {err}")
        return None
    job = allocation.job_id
    here = environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]

    def start(nodes: Sequence[str]) -> Monitors:
        argv, its_environ = _monitors(job, nodes, here, environ, step)
        process = start_tied(
            argv, environ=its_environ, stdin=PIPE, stdout=PIPE, stderr=NOTHING, signal_mask=()
        )
        return Monitors(process, nodes, 0)

    return _Job(
        variable=JOB,
        mark=str(job),
        here=here,
        nodes=its_nodes,
        start=start,
        only_step=step,
        left_of=lambda had: _nodes_left(had, allocation.array or str(job), environ),
    )


def _without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a training that is not the whole of a job, if it is in one."""
    ours = "SLURM_HEALTH_"
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(ours) or not name.startswith("SLURM")
    }


def _carried(options: argparse.Namespace) -> _Job:
    """Return the training whose torchrun has started us, and carries what monitors say."""
    from slurm_health.training.monitor.monitors import carried
    from slurm_health.training.monitor.node import TRAINING

    numbers = itertools.count(1)
    return _Job(
        variable=TRAINING,
        mark=options.training,
        here=options.node,
        nodes=options.nodes.split(","),
        start=lambda nodes: carried(options.reading, options.writing, next(numbers), nodes, 0),
        left_of=lambda had: had,
    )


def _watch(
    job: _Job,
    directory: Path | None,
    script: str,
    environ: Mapping[str, str],
    mode: str,
    *,
    tell: bool,
) -> int:
    """Return the code to end with."""
    # Only now: a script of seconds is not to wait for what it has no use for.
    import msgspec

    from slurm_health.training.monitor.findings import ScriptToEnd, WatchFindings, acting
    from slurm_health.training.monitor.monitors import MonitorsEnded, ScriptOver

    findings = WatchFindings(directory, environ, on_hang=acting(mode, environ))
    try:
        if _heartbeat_comes(job, findings, script, environ):
            _watch_nodes(job, findings)
    except (ScriptOver, MonitorsEnded):
        pass
    except ScriptToEnd as ends:
        if tell:
            os.write(1, msgspec.json.encode(ends.hang))
        return SCRIPT_HANGS
    except OSError as err:
        _say(f"monitor: not running: {err}")
    return 0


def _watch_nodes(job: _Job, findings: WatchFindings) -> None:
    """Watch; where Slurm takes a node out of the job, and its step ends, on those that are left.

    Raises:
        ScriptOver: the script has ended.
        ScriptToEnd: it hangs, and is to be ended.
        OSError: the monitors could not be started.
    """
    from slurm_health.records.nodeset import fold
    from slurm_health.training.monitor.monitors import MonitorsEnded
    from slurm_health.training.monitor.watch import Watch

    nodes = job.nodes
    while nodes:
        monitors = job.start(nodes)
        try:
            Watch(monitors, nodes, findings).run()
        except MonitorsEnded:
            pass
        finally:
            monitors.end()
        left = nodes
        # At a job's end its steps may end before its script does: that is no news. And a step on a
        # node that is lost may end before Slurm takes the node out of the job.
        for _ in range(_LOOKS_AT_END):
            if _script_ends_within(_END_OF_STEPS_S):
                return
            left = job.left_of(nodes)
            if set(left) != set(nodes):
                break
        lost = [node for node in nodes if node not in left]
        if not lost:
            _say("monitor: its processes have ended; nothing watches this job any more")
            return
        if left:
            _say(f"monitor: Slurm took {fold(lost)} out of the job; it watches the rest")
        nodes = left


def _nodes_left(nodes: Sequence[str], job: str, environ: Mapping[str, str]) -> Sequence[str]:
    """Return those of its nodes that the job still has, none where it has ended.

    All of them where Slurm does not say.
    """
    from slurm_health.records.errors import SlurmError
    from slurm_health.system.slurm.client import Client

    try:
        shown = Client.for_hook(environ, limit_s=_SLURM_S).job(job)
    except SlurmError:
        return nodes
    if shown.states != {"RUNNING"}:
        return ()
    return [node for node in nodes if node in shown.nodes]


def _script_ends_within(wait_s: float) -> bool:
    return bool(select.select([0], [], [], wait_s)[0])


def _heartbeat_comes(
    job: _Job, findings: WatchFindings, script: str, environ: Mapping[str, str]
) -> bool:
    """Wait until a rank on this node has a heartbeat, or had one; follow the output until then.

    Returns:
        False where the script ends before.

    Raises:
        ScriptOver: it ends while processes are looked at.
        ScriptToEnd: it hangs, and is to be ended.
    """
    from slurm_health.training.diagnosis.by_movement import Movement
    from slurm_health.training.diagnosis.by_output import OutputProgress
    from slurm_health.training.monitor.output_files import Tails
    from slurm_health.training.monitor.ranks import Ranks
    from slurm_health.training.monitor.watch import OutputWatch

    ranks = Ranks(job.mark, job.here, "", variable=job.variable, only_step=job.only_step)
    tails = Tails(script, Path.cwd(), environ)
    movement = Movement()
    output = OutputWatch(
        tails, OutputProgress(), movement, lambda: job.start(job.nodes), job.nodes, findings
    )
    looked_s = float("-inf")
    while True:
        now_s = time.monotonic()
        is_due = now_s - looked_s >= _LOOK_S - _MOVE_S / 2
        if is_due:
            ranks.find()
            looked_s = now_s
            now = ranks.now()
            # Where the one here has ended, those on other nodes may wait for it.
            beating = ranks.outlived or any(each.steps for each in now)
            if not beating:
                output.look()
            output.record(now, now_s=time.monotonic(), beating=beating)
            if beating:
                return True
        output.move(ranks.alone(), time.monotonic())
        began_s = time.monotonic()
        if _script_ends_within(_MOVE_S):
            return False
        late_s = time.monotonic() - began_s - _MOVE_S
        if late_s > _SUSPENDED_S:
            movement.sleep(late_s)


def _monitors(
    job: int, nodes: Sequence[str], here: str, environ: Mapping[str, str], step: str
) -> tuple[list[str], Mapping[str, str]]:
    """Return what starts the monitors, and its environment: a job of one node needs no step."""
    from slurm_health.system.processes import own_module
    from slurm_health.system.slurm.command import clean_environ, step_argv
    from slurm_health.training.monitor.node import INTERVAL_S, JOB

    words = (str(job), here, f"{INTERVAL_S:g}", *((JOB, step) if step else ()))
    command = own_module("slurm_health.training.monitor.node", *words)
    if len(nodes) == 1:
        return list(command), environ
    # It needs no device, and takes none from a step of the user's.
    return step_argv(job, nodes, ["--gres=none"], command), clean_environ(environ)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"slurm-health: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
