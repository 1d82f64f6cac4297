# SPDX-License-Identifier: Apache-2.0
"""What the hooks measure on a node: one file per family of checks.

`measure` looks at the machine, as root, in a child that is killed at its time limit, and returns a
finding.

    check        what a check is, and the built-in ones, which are loaded when a site uses them
    memory       RAM, swap, memory errors
    filesystem   mounted, of the right type, writable, not full, not hung
    tasks        load, leftovers of a job, daemons
    watches      jobs whose watch has died
    clock        the clock source, processors online
    cpu_speed    how fast the processors are
    kernel_log   patterns in the kernel's log; Xid and SXid errors of GPUs and NVSwitches
    gpu          NVIDIA GPUs, and processes on them
    rows         the table by which the output of a tool is judged
    vendors      AMD GPUs, NVMe drives, the board's controller, NVIDIA's diagnostic
    network      InfiniBand and RoCE ports, Ethernet interfaces
    external     files, programs of the site, LBNL NHC
"""
