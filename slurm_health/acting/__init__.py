# SPDX-License-Identifier: Apache-2.0
"""Carries out what `core.acting` decided: records, drains, shrinks, and last of all requeues.

Runs in the process of the master, as the job's user, and in the helper job that releases a
requeued job. It changes Slurm through `slurm`, and writes the journal.

    perform          records the intent, acts, records the result; requeues last
    job_facts        what the job and its owner can do, from Slurm and the journals
    leave            how a job leaves its nodes: requeued elsewhere, or held
    requeue_helper   the helper job that waits for the requeue and releases the job
    fewer_nodes      a waiting job asks for fewer nodes if its partition has no more
"""
