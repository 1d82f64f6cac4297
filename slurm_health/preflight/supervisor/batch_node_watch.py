# SPDX-License-Identifier: Apache-2.0
"""A step on another node that gives a job back to Slurm whose batch node is lost.

A job that is to survive the loss of a node (`--no-kill`) survives that of its batch node as well:
Slurm takes the node out, ends the batch script, and lets the job run on to its time limit with
nobody in it (22.05.8, 24.11.5, 26.05.5). So one of its other nodes listens whether this one is
there, by what comes through srun, and asks Slurm only where nothing does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from slurm_health.preflight.supervisor.recorder import say
from slurm_health.records.allocation import from_environ
from slurm_health.records.errors import AllocationError
from slurm_health.system import processes
from slurm_health.system.slurm.command import clean_environ, step_argv

PULSE_S = 30.0
_LEAVE_S = 1.0
_GRACE_S = 2.0


@contextlib.contextmanager
def beside(
    nodes: Sequence[str],
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    pulse_s: float = PULSE_S,
) -> Iterator[None]:
    """While active, the last of some nodes listens; if it cannot, that is said.

    They are nodes of the job that `environ` describes, all of them if none is named. What is
    started has `mask`.
    """
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    try:
        step = _started(nodes, text, mask, pulse_s)
    except (AllocationError, OSError) as err:
        say(f"should this node be lost, nothing ends the job before its time limit: {err}")
        step = None
    if step is None or step.stdin is None:
        yield
        return
    over, pipe = threading.Event(), step.stdin.fileno()
    os.set_blocking(pipe, False)

    def beat() -> None:
        while not over.wait(pulse_s):
            # A step that has ended, or reads nothing, is not to disturb the script.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(pipe, b".\n")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        processes.close_pipes(step)
        processes.end_session(step, leave_s=_LEAVE_S, grace_s=_GRACE_S)


def _started(
    nodes: Sequence[str], environ: Mapping[str, str], mask: Collection[int], pulse_s: float
) -> processes.Process | None:
    """Return the step on another node, None if there is no other.

    Raises:
        AllocationError: the job cannot be read.
        OSError: the step cannot be started.
    """
    job = from_environ(environ)
    here = environ.get("SLURMD_NODENAME", job.nodes[0])
    others = [node for node in nodes or job.nodes if node != here]
    if not others:
        return None
    name, attempt = job.array or str(job.job_id), str(job.attempt)
    module = "slurm_health.training.monitor.batch_node"
    command = processes.own_module(module, name, here, f"{pulse_s:g}", attempt)
    return processes.start_tied(
        step_argv(job.job_id, others[-1:], ["--gres=none"], command),
        environ=clean_environ(environ),
        stdin=processes.PIPE,
        stdout=processes.NOTHING,
        stderr=processes.NOTHING,
        signal_mask=mask,
    )
