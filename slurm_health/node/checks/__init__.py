# SPDX-License-Identifier: Apache-2.0
"""What the hooks measure on a node: one file per family of checks.

`collect` looks at the machine, as root, in a child that is killed at its time limit; `judge` is
pure.

    check        what a check is, and which there are; each is loaded when a site uses it
    memory       RAM, swap, memory errors, huge pages
    filesystem   mounted, of the right type, writable, not full, not hung
    tasks        load, zombies, stuck processes, leftovers of a job, daemons and units
    clock        clock, clock source, processors online
    cpu_speed    how fast the processors are
    kernel_log   patterns in the kernel's log; Xid and SXid errors of GPUs and NVSwitches
    gpu          NVIDIA GPUs, and processes on them
    dcgm         NVIDIA's own diagnostic of its GPUs
    amd_gpu      AMD GPUs
    nvme         local NVMe drives: wear and errors
    bmc          fans, power supplies and memory events, as the board's controller tells them
    optics       cables and optics of the network
    network      InfiniBand and RoCE ports, Ethernet interfaces
    external     files, programs of the site, Nagios plugins, LBNL NHC
"""
