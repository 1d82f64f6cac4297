# SPDX-License-Identifier: Apache-2.0
"""Carries out what `core.acting` decided: records, drains, shrinks, and last of all requeues.

Runs in the process of the master, as the job's user, and in the helper job that releases a
requeued job. It changes Slurm through `slurm`, and writes the journal.

    perform             records the intent, acts, records the result; requeues or holds last
    job_facts           what the job and its owner can do, from Slurm and the journals
    requeue_helper      submits the helper job, and says what it is told
    release_elsewhere   runs in the helper job: waits for the requeue and releases the job
"""
