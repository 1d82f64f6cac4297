# SPDX-License-Identifier: Apache-2.0
"""The worker, one process per device; the only room that loads torch.

Workers run in the training job's own interpreter (`--python`), which may be older than the one
that slurm-health runs in and has none of its dependencies. So these modules use the standard
library and torch, and nothing else of slurm-health. They touch the device, and talk to their agent
through pipes.

    worker               the process: loads torch once, then runs round after round
    worker_round         one round of it: its probes and groups, what it hears and says meanwhile
    meeting              how the members of a group come together, and stop waiting for each other
    membership           the process group of a worker: formed, tried, interrupted, left
    load                 finds a probe's `measure`: built in, in a Python file, or any program
    context              what a probe is given, and what it returns
    device               which device a worker has, and whether it can be used
    device_users         which other processes use a device
    timing               how often something is timed, by all of a group at once
    adapters             which network adapters are in use, and near which device
    values               products of integers, whose exact result is known
    matmul               how fast a device multiplies matrices
    memory_copy          how fast a device's memory is
    memory_pattern       whether a device's memory gives back what was written to it
    host_copy            how fast a device exchanges data with its host
    allgather            how fast the members of a group exchange data
    nic_loopback         how fast a node exchanges data with itself through each adapter
    gpt_model            the GPT that the next two train, and one step of it
    gpt_fit              the largest batch with which it fits the device
    gpt                  a pair of nodes that trains it: compute, communication, and both
    torchrun_arguments   a torchrun command line, read by torchrun's own parser
    torchrun_restarts    torchrun, whose nodes are looked at before it starts workers again
"""
