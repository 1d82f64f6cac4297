# SPDX-License-Identifier: Apache-2.0
"""The only door to Slurm.

Used by every process that asks Slurm something or changes something in it. It runs Slurm's
commands, or pyslurm in a child process, and puts a deadline on each call.

    client           what is asked of Slurm and changed in it
    reads            what is read, through scontrol or pyslurm, if that is installed and fits
    job_gres         what a job has of GPUs on each node, and how a step asks for all of it
    parsing          jobs, nodes and partitions from scontrol's output
    command          runs one command with a deadline; which sbatch on PATH is Slurm's
    last_word        what becomes of a job that Slurm ends, in its output or by its state
"""
