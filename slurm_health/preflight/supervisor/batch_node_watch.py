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
from slurm_health.records.allocation import Allocation, from_environ
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
    """While active, the last of some nodes listens; nothing is raised where it cannot.

    They are nodes of the job that `environ` describes, all of them where none is named. What is
    started has `mask`.
    """
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    try:
        job = from_environ(text)
        here = text.get("SLURMD_NODENAME", job.nodes[0])
        others = [node for node in nodes or job.nodes if node != here]
        watch = _Watch(job, here, others[-1], text, mask, pulse_s) if others else None
    except (AllocationError, OSError) as err:
        say(f"should this node be lost, nothing ends the job before its time limit: {err}")
        watch = None
    try:
        yield
    finally:
        if watch is not None:
            watch.end()


class _Watch:
    """The step on that node, from its start until `end`."""

    def __init__(
        self,
        job: Allocation,
        here: str,
        node: str,
        environ: Mapping[str, str],
        mask: Collection[int],
        pulse_s: float,
    ) -> None:
        command = processes.own_module(
            "slurm_health.training.monitor.batch_node",
            job.array or str(job.job_id),
            here,
            f"{pulse_s:g}",
            str(job.attempt),
        )
        self._step = processes.start_tied(
            step_argv(job.job_id, [node], ["--gres=none"], command),
            environ=clean_environ(environ),
            stdin=processes.PIPE,
            stdout=processes.NOTHING,
            stderr=processes.NOTHING,
            signal_mask=mask,
        )
        assert self._step.stdin is not None
        os.set_blocking(self._step.stdin.fileno(), False)
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, args=(pulse_s,), daemon=True)
        self._pulse.start()

    def _beat(self, pulse_s: float) -> None:
        assert self._step.stdin is not None
        while not self._over.wait(pulse_s):
            # A step that has ended, or reads nothing, is not to disturb the script.
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._step.stdin.fileno(), b".\n")

    def end(self) -> None:
        """End it."""
        self._over.set()
        self._pulse.join()
        processes.close_pipes(self._step)
        processes.end_session(self._step, leave_s=_LEAVE_S, grace_s=_GRACE_S)
