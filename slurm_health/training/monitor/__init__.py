# SPDX-License-Identifier: Apache-2.0
"""Processes beside the job: one per node while its script runs, and one after its failure.

The supervisor starts them and waits for them for a limited time. Collectors alone read from the
outside world after a failure, in children that are killed when they hang; `training.diagnosis`
infers.

    watch         while the script runs: follows agents and output, reports hangs and slow ranks
    agent         on every node: samples and inspects the ranks, reads the node's state
    agents        the agents of all nodes: start, ask, replace
    messages      the transport of reports
    ranks         the ranks on a node: their processes, resource use and places
    voices        the places of ranks: by heartbeat, Flight Recorder, py-spy
    gpu_activity  the activity of ranks' GPUs, by NVML
    connections   TCP sockets: unanswered data, traffic, listeners
    events        reports and records events, and acts on hangs as the user wants
    output_files  the job's output files, also those of its sruns, and their new text
    nccl_ras      live collector: how far ranks are by NCCL itself

    batch_node    on another node: gives a job back whose batch node is lost

    explain       a post-mortem of any job's files, on any machine
    post_mortem   collect, diagnose, print, record
    containment   runs collectors and a site's operators in children
    registry      the built-in and the registered collectors and operators
    collector     the job whose script has ended, for collectors
    job_collectors  collectors: the job's output, Slurm, the monitor, ports
    every_node    collector: the states of all nodes
    node_state    the state of one node
    flight_dumps  collector: Flight Recorder dumps
"""
