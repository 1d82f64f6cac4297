# SPDX-License-Identifier: Apache-2.0
"""Waits for all of a job's nodes in Ray, and runs one task on each."""

import os
import time

import ray

ray.init(log_to_driver=False)
wanted = int(os.environ["SLURM_NNODES"])
while len(ray.nodes()) < wanted:
    time.sleep(0.5)


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where() -> str:
    """Return the node that this runs on."""
    time.sleep(1)
    return os.uname().nodename


found = sorted(set(ray.get([where.remote() for _ in range(2 * wanted)])))
print(f"ran on {len(found)} nodes: {' '.join(found)}", flush=True)
