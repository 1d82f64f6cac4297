# SPDX-License-Identifier: Apache-2.0
"""Carries out what `preflight.decide` decided: records, drains, shrinks, and last of all requeues.

Runs in the process of the master, as the job's user, and in the helper job that releases a
requeued job. It changes Slurm through `slurm`, drains through `draining`, and writes the journal.

    job_facts           what the job and its owner can do, from Slurm and the journals
    perform             records the intent, acts, records the result; requeues last
    unchecked           says on the job that it could not be checked
    release_elsewhere   runs in the helper job: excludes the bad nodes, releases the job
"""
