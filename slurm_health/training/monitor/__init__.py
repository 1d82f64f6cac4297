# SPDX-License-Identifier: Apache-2.0
"""Processes beside the job: one per node while its script runs, and one after that has failed.

The supervisor starts them and does not wait for them for long. What touches the world after a
failure is in collectors, each in a child of its own that is killed when it hangs; what is inferred
is `training.diagnosis`'s.

    beside        while the script runs: starts the monitors of all nodes, ends with the script
    watch         hears them, and says where a training hangs; without a heartbeat, the output, and
                  if that ends, the processes
    node          the monitor of one node
    ranks         the ranks on a node: their heartbeats, and what the kernel says of them
    closer_look   what is looked at of them only while a training stands still: what GPUs do, as
                  NVML tells it, and by py-spy where ranks are that do not say so
    connections   TCP connections: which do not get through, and how fast the others are
    monitors      talks with the monitors of all nodes
    findings      says, records and does what the user wants about what was found
    output_files  the job's output files: those the script has srun write, and what is new in them
    silent_ranks  which processes are ranks without a heartbeat; their Flight Recorder
    nccl_ras      live collector: how far each rank is by NCCL itself
    messages      what monitors tell the watch

    batch_node    on another node: gives a job back whose batch node is lost

    explain       the same by files of any job, wherever they are read
    post_mortem   collect, diagnose, say, record
    containment   collectors and operators of others, run so that they can raise and hang
    registry      the collectors and operators there are, other distributions' too, which
                  `training.plugins` defines
    collector     what a collector is, and what it is told of the job
    job_collectors  collectors: the ends of the job's output, what Slurm and the monitor say of it
    every_node    collectors: what every node of the job tells
    node_state    on one node: what that is
    flight_dumps  collector: Flight Recorder dumps
"""
