# SPDX-License-Identifier: Apache-2.0
"""The worker, one process per device; the only room that loads torch.

Workers run in the training job's own interpreter (`--python`), which may be older than the one
that slurm-health runs in and has none of its dependencies. So these modules use the standard
library and torch, and nothing else of slurm-health. They touch the device, and talk to their agent
through pipes. Where that interpreter has no torch, or none is wanted, light probes run in
slurm-health's own, with numpy.

    worker               the process: loads a kit once, then runs round after round
    kits                 one face for both kits; finds a probe: ours, in a file, or any program
    torch_kit            torch's devices, store, and groups: formed, tried, interrupted, left
    light_kit            processors, numpy and sockets
    worker_round         one round of it: its probes and groups, what it hears and says meanwhile
    meeting              how a group comes together, and stops waiting; a node's smaller groups
    context              what a probe is given, and what it returns
    device               which device a worker has, and whether it can be used
    nvml                 the driver's own library, asked about one device and who uses it
    timing               what takes how long, and what others took of it; by all of a group at once
    host                 processors and their memory, and which interface the job's data takes
    adapters             which network adapters the job's NCCL may use, and how fast they are
    compute              how fast, and whether exactly, a device multiplies matrices
    memory               how fast a device's memory is, and whether it holds what is written
    device_copy          how fast a device exchanges data with its host, and with each other one
    allgather            how fast the members of a group exchange data
    light_compute        how fast, and whether exactly, processors multiply
    light_memory         how fast each NUMA node's memory is, and whether it holds what is written
    light_exchange       how fast and how soon light workers exchange data
    light_ring           the group of light workers: where they meet, each connected to the next
    gpt                  a pair of nodes that trains one: compute, communication, and both; and the
                         largest batch with which it fits a device
"""
