# SPDX-License-Identifier: Apache-2.0
"""The worker, one process per device; the only room that loads torch.

Workers run in the training job's own interpreter (`--python`), which may be older than the one
that slurm-health runs in and has none of its dependencies. So these modules use the standard
library and torch, and nothing else of slurm-health. They touch the device, and talk to their agent
through pipes. Where that interpreter has no torch, or none is wanted, light probes run in
slurm-health's own, with numpy. Each probe is written once.

    worker               the process: opens a device once, then runs round after round
    worker_round         one round of it: its probes and groups, and the lines in between
    context              what a probe is given and returns; the protocols Device and Group
    own                  what runs a probe: ours, one in a site's own file, any program
    torch_device         a device of torch's: an accelerator, or processors
    torch_group          groups over NCCL and gloo: formed, tried, interrupted, left
    light                a device and a group without torch: processors, numpy and TCP
    meeting              how workers reach each other, and in which order
    sizes                how much work a run's devices are given, and which GPT they train
    timing               what takes how long, and what others took of it; by all of a group at once
    compute              how fast, and whether exactly, a device multiplies matrices
    memory               how fast a device's memory is, and whether it holds what is written
    exchange             how fast devices exchange data, with each other and with their host
    gpt                  a pair of nodes that trains one: compute, communication, and both; and the
                         largest batch with which it fits a device
    host                 processors and their memory, interfaces and adapters of the job
    nvml                 the driver's own library, asked about one device and who uses it
"""
