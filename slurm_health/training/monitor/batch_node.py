# SPDX-License-Identifier: Apache-2.0
"""On another node: gives a job back whose batch node is lost.

`python -m slurm_health.training.monitor.batch_node JOB NODE PULSE_S RESTARTS`. Standard input
delivers data every PULSE_S while the batch script runs, and ends with it. After a silence Slurm is
asked, and decides: the job runs, and no longer on that node. Then it is requeued, as Slurm requeues
jobs that lose a node; a job without permission to requeue is cancelled. More than RESTARTS restarts
mean that it was given back already: Slurm had lost this node, too, and the job runs elsewhere.
"""

from __future__ import annotations

import os
import select
import signal
import sys

_SILENT_PULSES = 3  # of our own running time: a suspension stops the whole job


def main() -> int:
    """Wait until the batch script ends, or its node is lost."""
    job, node, pulse_s, restarts = sys.argv[1:]
    # Slurm's signals to all processes of the job are for the script.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    silent = 0
    while True:
        if select.select([0], [], [], float(pulse_s))[0]:
            if not os.read(0, 4096):
                return 0
            silent = 0
            continue
        silent += 1
        if silent < _SILENT_PULSES:
            continue
        from slurm_health.records.errors import SlurmError
        from slurm_health.system.slurm.client import Client

        client = Client(os.environ)
        try:
            allocation = client.job(job)
            if allocation.restarts > int(restarts):
                return 0
            here = not allocation.nodes or node in allocation.nodes
            if allocation.states != {"RUNNING"} or here:
                continue
            if allocation.value("Requeue") == "0":  # --no-requeue, or JobRequeue=0
                client.cancel(job)
            else:
                client.requeue(job)
        except SlurmError:  # it does not answer, or refuses now: asked again after the next pulse
            continue
        return 0


if __name__ == "__main__":
    sys.exit(main())
