# SPDX-License-Identifier: Apache-2.0
"""All access to Slurm.

It runs Slurm's commands, or pyslurm in a child process, with a deadline on every call.

    client           queries of Slurm, and changes in it
    reads            jobs and nodes, through scontrol, or pyslurm if it fits this Slurm
    job_gres         the GPUs of a job on its nodes, and how a step requests all of them
    parsing          jobs, nodes and partitions from scontrol's output
    command          runs one command with a deadline; the sbatch on PATH that is Slurm's
    last_word        why Slurm ends a job, from its output or its state
"""
