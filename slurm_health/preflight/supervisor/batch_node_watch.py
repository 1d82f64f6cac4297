# SPDX-License-Identifier: Apache-2.0
"""A step on another node that ends a job whose batch node is lost.

A job that survives the loss of a node (`--no-kill`) survives that of its batch node as well: Slurm
takes the node out, ends the batch script, and leaves the job idle to its time limit (22.05.8,
24.11.5, 26.05.5). So one of its other nodes receives a heartbeat from this one through srun, and
asks Slurm only when there is none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from slurm_health.preflight.supervisor.environ import as_text
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
    """While active, the last of some nodes watches this one; if it cannot, say so.

    They are nodes of the job that `environ` describes, all of them if none is named. The step
    starts with `mask`.
    """
    text = as_text(environ)
    step = None
    try:
        job = from_environ(text)
        here = text.get("SLURMD_NODENAME", job.nodes[0])
        others = [node for node in nodes or job.nodes if node != here]
        if others:
            name, attempt = job.array or str(job.job_id), str(job.attempt)
            module = "slurm_health.training.monitor.batch_node"
            command = processes.own_module(module, name, here, f"{pulse_s:g}", attempt)
            step = processes.start_tied(
                step_argv(job.job_id, others[-1:], ["--gres=none"], command),
                environ=clean_environ(text),
                stdin=processes.PIPE,
                stdout=processes.NOTHING,
                stderr=processes.NOTHING,
                signal_mask=mask,
            )
    except (AllocationError, OSError) as err:
        say(f"if this node is lost, the job stays idle until its time limit: {err}")
    if step is None or step.stdin is None:
        yield
        return
    ended, pipe = threading.Event(), step.stdin.fileno()
    os.set_blocking(pipe, False)

    def beat() -> None:
        while not ended.wait(pulse_s):
            # A step that has ended, or reads nothing, must not disturb the script.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(pipe, b".\n")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        processes.close_pipes(step)
        processes.end_session(step, leave_s=_LEAVE_S, grace_s=_GRACE_S)
