# SPDX-License-Identifier: Apache-2.0
"""Submits a tiny training with submitit, waits for it, and prints what it returned."""

import submitit
from train_submitit import train

executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(nodes=2, ntasks_per_node=1, time=30, job_name="submitit")
job = executor.submit(train)
print("job", job.job_id, flush=True)
print("returned", job.results(), flush=True)
