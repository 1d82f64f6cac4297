# SPDX-License-Identifier: Apache-2.0
"""The lines of the kernel's log that say something of the node, told from those a user can write.

A user chooses the name of a process (15 bytes), of its file, and of interfaces and cgroups of their
own, and the kernel prints these, often at the beginning of a line. So each pattern here begins at
the beginning, names a device by the characters that the kernel gives it and no others, and goes on
with the kernel's own words right behind it. Pure.
"""

from __future__ import annotations

import re

# /dev/kmsg writes \x1b for a byte that cannot be printed, and for a backslash.
_COMM = r"(?:\\x[0-9a-f]{2}|[^\\]){0,15}"
# The forms in which the kernel begins a line with a process: `name[77]: segfault`, `name[77] bad
# frame`, `name (77) used greatest stack depth`, `name/77: potentially unexpected fatal signal`.
_OF_A_PROCESS = re.compile(_COMM + r"(?:\[\d+\]|/\d+:| \(\d+\)[: ]| invoked oom-killer:)")

# A loop device's filesystem may be an image that a user brought along.
_DISK = r"(?!loop)[\w!-]+"
_PCI = r"(?:PCI:)?(?P<bus>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"

# NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, of an instance of a GPU (MIG).
XID = rf"^NVRM: (?P<kind>Xid) \({_PCI}(?: GPU-I:\d{{1,3}})?\): (?P<number>\d{{1,5}})\b(?P<text>.*)"
# Older drivers say of a lost GPU no number:
# NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.
# or, in three lines: NVRM: The NVIDIA GPU 0000:18:00.0 / NVRM: (PCI ID: 10de:2901) installed in
# this system has / NVRM: fallen off the bus and is not responding to commands.
LOST_GPU = (
    rf"^NVRM: GPU (?:at )?{_PCI}: GPU has fallen off the bus"
    r"|^NVRM: fallen off the bus and is not responding to commands"
)
LOST_GPU_NAMED = rf"^NVRM: The NVIDIA GPU {_PCI}"
# nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up
SXID = (
    rf"^nvidia-nvswitch\d+: (?P<kind>SXid) \({_PCI}\): (?P<number>\d{{1,5}}),"
    r" (?:(?P<word>Fatal|Non-fatal), )?(?P<text>.+)"
)
# To choose messages by, which needs no names.
ANY_XID = (
    r"^NVRM: Xid \(|^NVRM: GPU .{0,30}: GPU has fallen off the bus|^NVRM: The NVIDIA GPU "
    r"|^NVRM: fallen off the bus|^nvidia-nvswitch\d+: SXid \("
)
OUT_OF_MEMORY = (
    r"^(?:Out of memory|Memory cgroup out of memory)(?: \(oom_kill_allocating_task\))?:"
    r" Kill(?:ed)? process \d+ \("
)
HUNG_TASK = rf"^INFO: task {_COMM}:\d+ blocked for more than \d+ seconds"
MACHINE_CHECK = r"^mce: \[Hardware Error\]: "
BLOCK_IO_ERROR = (
    rf"^(?:(?:blk_update_request|print_req_error): )?(?:critical medium|I/O) error, dev {_DISK},"
    rf" sector \d|^Buffer I/O error on dev {_DISK}, logical block \d"
)
PCIE_ERROR = (
    r"^[\w-]+ [0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: (?:AER: )?"
    r"PCIe Bus Error: severity=(?:Uncorrected|Fatal)"
)

# Broken hardware, or a broken filesystem.
FAULTS = (
    MACHINE_CHECK + r".*(?:Uncorrected|uncorrected|Fatal)",
    r"^Memory failure: 0x[0-9a-f]+: recovery action for [\w/ -]+: (?:Failed|Ignored)",
    rf"^EXT4-fs error \(device {_DISK}\)",
    rf"^EXT4-fs \({_DISK}\): Remounting filesystem read-only",
    rf"^EXT4-fs \({_DISK}\): I/O error while writing superblock",
    rf"^XFS \({_DISK}\): (?:metadata I/O error|Metadata I/O Error|Corruption )",
    rf"^BTRFS (?:error|critical) \(device {_DISK}(?:: state \w+| state \w+)?\)",
    r"^nvme nvme\d+: (?:controller is down|Removing after probe failure)",
    r"^nvme nvme\d+: Disabling device after reset failure: -\d",
    r"^block nvme\d+n\d+: no available path - failing I/O",
    r"^md/raid\d+:?md\d+: Disk failure on [\w!-]+(?: detected)?, failing array",
)
# What a program may have caused, or what may pass.
WARNINGS = (
    r"^(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#\d",
    r"^(?:NMI )?watchdog: Watchdog detected hard LOCKUP on cpu \d",
    r"^(?:rcu: )?INFO: rcu_\w+ self-detected stall on CPU",
    HUNG_TASK,
    OUT_OF_MEMORY,
    PCIE_ERROR,
    r"^nvme nvme\d+: I/O .{1,60} timeout, (?:reset controller|aborting)",
    r"^NETDEV WATCHDOG: [\w.-]{1,15}(?: \([\w-]+\))?: transmit queue \d+ timed out",
    r"^mlx5_core [0-9a-f:.]{7,16}: .{0,60}(?:assert_var|firmware internal error|Health issue)",
)


def is_evidence(line: str) -> bool:
    """Tell whether a line of the kernel's may be held against the node, whatever matches it.

    One that begins with a process may not: it says what its user has chosen.
    """
    return _OF_A_PROCESS.match(line) is None
