# SPDX-License-Identifier: Apache-2.0
"""Processes beside the job: one per node while its script runs, and one after that has failed.

The supervisor starts them and does not wait for them for long. What touches the world after a
failure is in collectors, each in a child of its own that is killed when it hangs; what is inferred
is `training.diagnosis`'s.

    watch         while the script runs: follows agents and output, reports hangs and what is slow
    agent         on each node: samples the ranks, inspects them, answers for the node's state
    agents        the agents of all nodes: started, asked, replaced
    messages      how reports travel
    ranks         the ranks on a node: which processes they are, what these use, where they are
    voices        how ranks say where they are: by heartbeat, Flight Recorder, py-spy
    gpu_activity  what the GPUs of ranks do, by NVML
    connections   TCP sockets: which get no answer, what they have sent, who listens
    events        reports, records and does what the user wants about what is seen
    output_files  the job's output files: those the script has srun write, and what is new in them
    nccl_ras      live collector: how far each rank is by NCCL itself

    batch_node    on another node: gives a job back whose batch node is lost

    explain       the same by files of any job, wherever they are read
    post_mortem   collect, diagnose, say, record
    containment   collectors and operators of others, run so that they can raise and hang
    registry      the collectors and operators there are, other distributions' too, which
                  `training.plugins` defines
    collector     what a collector is, and what it is told of the job
    job_collectors  collectors: the ends of the job's output, what Slurm and the monitor say of it
    every_node    collector: how every node of the job is
    node_state    on one node: what that is
    flight_dumps  collector: Flight Recorder dumps
"""
