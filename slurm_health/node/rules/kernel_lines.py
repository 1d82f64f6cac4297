# SPDX-License-Identifier: Apache-2.0
"""The lines of the kernel's log that say something of the node, told from those a user can write.

A user chooses the name of a process (15 bytes), of its file, and of interfaces and cgroups of their
own, and the kernel prints these, often at the beginning of a line. So each pattern here begins at
the beginning, names a device by the characters that the kernel gives it and no others, and goes on
with the kernel's own words right behind it. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm_health.node.rules.finding import Status

# /dev/kmsg writes \x1b for a byte that cannot be printed, and for a backslash.
_COMM = r"(?:\\x[0-9a-f]{2}|[^\\]){0,15}"
# The forms in which the kernel begins a line with a process: `name[77]: segfault`, `name[77] bad
# frame`, `name (77) used greatest stack depth`, `name/77: potentially unexpected fatal signal`.
_OF_A_PROCESS = re.compile(_COMM + r"(?:\[\d+\]|/\d+:| \(\d+\)[: ]| invoked oom-killer:)")

# A loop device's filesystem may be an image that a user brought along.
_DISK = r"(?!loop)[\w!-]+"
_BTRFS = rf"{_DISK}(?:: state \w+| state \w+)?"
# A mapped device (dm) may lie on a user's image, as containers that are encrypted do.
_OWN_DISK = r"(?!loop|dm-|nbd|rbd|ublk|zram|ram)[\w!-]+"
_BEYOND = rf"{_DISK}: rw=\d+, (?:want=\d+, |sector=\d+, nr_sectors = \d+ )limit=\d"
_PCI = r"(?:PCI:)?(?P<bus>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"

# Of a message of several lines, as /dev/kmsg writes it. What is behind may be a file's name, so no
# message is taken apart: each form says all that stands before.
_NEXT_LINE = r"\\x0a"


def address(bus: str) -> str:
    """Return a PCI address in the one form that the kernel and NVML can both be compared by.

    The driver writes `0000:3b:00`, the kernel `0000:3b:00.0`, NVML `00000000:3B:00.0`.
    """
    parts = bus.lower().partition(".")[0].split(":")
    domain = parts[-3][-4:] if len(parts) > 2 else "0000"
    return ":".join([domain.zfill(4), *parts[-2:]])


# NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, of an instance of a GPU (MIG).
XID = rf"^NVRM: (?P<kind>Xid) \({_PCI}(?: GPU-I:\d{{1,3}})?\): (?P<number>\d{{1,5}})\b(?P<text>.*)"
# Older drivers say of a lost GPU no number:
# NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.
# or, in three lines: NVRM: The NVIDIA GPU 0000:18:00.0 / NVRM: (PCI ID: 10de:2901) installed in
# this system has / NVRM: fallen off the bus and is not responding to commands.
# These are one message, whose ends of lines /dev/kmsg writes as \x0a; a journal has three.
LOST_GPU = (
    rf"^NVRM: (?:The NVIDIA )?GPU (?:at )?{_PCI}(?:: GPU has|{_NEXT_LINE}NVRM: (?:\(PCI ID:"
    rf" [0-9a-f]{{4}}:[0-9a-f]{{4}}\) )?installed in this system has{_NEXT_LINE}NVRM:) fallen off"
    r" the bus|^NVRM: fallen off the bus and is not responding to commands"
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
# AMD's decoder (mce_amd) says it without `mce:`, and corrected errors in the same place.
AMD_MACHINE_CHECK = (
    r"^\[Hardware Error\]: "
    r"(?:Uncorrected, software (?:restartable|containable) error\.|System Fatal error\.)"
)
BLOCK_IO_ERROR = (
    rf"^(?:(?:blk_update_request|print_req_error): )?(?:critical medium|I/O) error, dev {_DISK},"
    rf" sector \d|^Buffer I/O error on dev {_DISK}, logical block \d"
)
PCIE_ERROR = (
    r"^[\w-]+ [0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: (?:AER: )?"
    r"PCIe Bus Error: severity=(?:Uncorrect(?:ed|able)|Fatal)"  # newer kernels: Uncorrectable
)


class LineKind(NamedTuple):
    """A kind of line: its name, what it tells, how it is judged, whose matter it is, what helps."""

    name: str
    what: str
    pattern: str
    status: Status
    whose: str
    helps: str


def _broken(name: str, what: str, whose: str, helps: str, *patterns: str) -> tuple[LineKind, ...]:
    return tuple(LineKind(name, what, each, Status.NODE_FAULT, whose, helps) for each in patterns)


def _to_look_at(
    name: str, what: str, whose: str, helps: str, *patterns: str
) -> tuple[LineKind, ...]:
    """Return lines of what a program may have caused, or what may pass."""
    return tuple(LineKind(name, what, each, Status.WARN, whose, helps) for each in patterns)


_REPLACE_DISK = "save what is on it, test the disk (smartctl), replace it"
_CHECK_FILES = "reboot the node, check the filesystem (fsck) and test the disk below it (smartctl)"
_STALLED = (
    "look at what the processes there wait for; if it repeats without a program, test the CPU"
)
KINDS: tuple[LineKind, ...] = (
    *_broken(
        "gpu-reset-required",
        "the driver refuses to use a GPU until it is reset",
        "GPU",
        "reset the GPU (nvidia-smi --gpu-reset), or reboot the node",
        r"^NVRM: nvAssert\w+: Assertion failed: Reset required \[NV_ERR_RESET_REQUIRED\]",
        r"^NVRM: nvAssert\w+: Assertion failed: [\w ]{1,60}! GPU marked for reset\b",
    ),
    *_broken(
        "machine-check",
        "the processor met an error that it could not correct",
        "processor or memory",
        "have the processor or the memory that it names replaced (rasdaemon, mcelog)",
        MACHINE_CHECK + r".*(?:Uncorrected|uncorrected|Fatal)",
        AMD_MACHINE_CHECK,
    ),
    *_broken(
        "memory-failure",
        "a page of memory is bad, and what was in it is lost",
        "memory",
        "reboot the node and have its memory tested",
        r"^Memory failure: 0x[0-9a-f]+: recovery action for [\w/ -]+: (?:Failed|Ignored)",
    ),
    *_broken(
        "filesystem-error",
        "a filesystem is damaged, or has made itself read-only",
        "disk or filesystem",
        _CHECK_FILES,
        rf"^EXT[234]-fs error \(device {_DISK}\)",
        # ext2 to ext4, F2FS and NILFS say it in these words.
        rf"^[A-Z][\w-]{{1,8}} \({_DISK}\): (?:error: )?[Rr]emounting filesystem read-only",
        rf"^[A-Z][\w-]{{1,8}} \({_DISK}\): I/O error while writing superblock",
        rf"^XFS \({_DISK}\): (?:[Mm]etadata|[Ll]og) I/O [Ee]rror",
        rf"^XFS \({_DISK}\): (?:Corruption |I/O Error Detected)",
        rf"^XFS \({_DISK}\): Filesystem has been shut down due to ",
        rf"^BTRFS (?:error|critical) \(device {_BTRFS}\)",
        rf"^BTRFS: error \(device {_BTRFS}\) in \w+:\d+: err(?:no|or)=-\d",
        rf"^BTRFS info \(device {_BTRFS}\): forced readonly",
    ),
    *_broken(
        "lost-write",
        "what was written to a disk is lost",
        "disk",
        _REPLACE_DISK,
        rf"^Buffer I/O error on dev {_OWN_DISK}, logical block \d+, lost (?:a?sync )page write",
    ),
    *_broken(
        "disk-lost",
        "a disk, or an array of disks, has been given up",
        "disk",
        _REPLACE_DISK,
        r"^nvme nvme\d+: (?:controller is down|Removing after probe failure)",
        r"^nvme nvme\d+: Disabling device after reset failure: -\d",
        r"^block nvme\d+n\d+: no available path - failing I/O",
        r"^md/raid\d+:?md\d+: Disk failure on [\w!-]+(?: detected)?, failing array",
    ),
    *_to_look_at(
        "soft-lockup",
        "a processor ran kernel code for many seconds without a pause",
        "kernel or program",
        _STALLED,
        r"^(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#\d",
    ),
    *_to_look_at(
        "hard-lockup",
        "a processor did not even take interrupts for many seconds",
        "kernel or processor",
        _STALLED,
        r"^(?:NMI )?watchdog: Watchdog detected hard LOCKUP on cpu \d",
    ),
    *_to_look_at(
        "rcu-stall",
        "a processor held up the kernel's housekeeping",
        "kernel or program",
        _STALLED,
        r"^(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU",
    ),
    *_to_look_at(
        "hung-task",
        "a process waits in the kernel for minutes",
        "filesystem or program",
        "look at the filesystem that the process uses: one that does not answer holds it so",
        HUNG_TASK,
    ),
    *_to_look_at(
        "out-of-memory",
        "the kernel killed a process because memory ran out",
        "program",
        "give the job more memory, or let it use less",
        OUT_OF_MEMORY,
    ),
    *_to_look_at(
        "pcie-error",
        "a device met an error on its bus that was not corrected",
        "device or its slot",
        "look at the device that it names; if it repeats, have it reseated or replaced",
        PCIE_ERROR,
    ),
    *_to_look_at(
        "disk-io-error",
        "a disk could not read or write a block",
        "disk",
        "test the disk (smartctl)",
        BLOCK_IO_ERROR,
    ),
    *_to_look_at(
        "read-only",
        "a filesystem that the line does not name is read-only now, or cannot be written",
        "disk or filesystem",
        "look for filesystems that have become read-only (findmnt -O ro) and at their disks",
        r"^(?:[A-Z][\w-]{1,8}: )?Remounting filesystem read-only$",
        r"^(?:[A-Z][\w-]{1,8}: )?I/O error while writing superblock$",
    ),
    *_to_look_at(
        "beyond-the-end",
        "something read or wrote beyond the end of a device",
        "filesystem or partition table",
        "compare the size of the filesystem with that of its device (dumpe2fs, xfs_info, lsblk)",
        rf"^{_BEYOND}",
        # In one message with its first half, which newer kernels begin with a process: the name of
        # one with spaces is passed over, as other things that a user wrote could read like it.
        r"^(?:[\w/:.+-]{1,15}: )?attempt to access beyond end of device"
        rf"(?:$|{_NEXT_LINE}{_BEYOND})",
    ),
    *_to_look_at(
        "nvme-timeout",
        "a disk did not answer in time",
        "disk",
        "test the disk (nvme smart-log); a busy one may be late once",
        r"^nvme nvme\d+: I/O .{1,60} timeout, (?:reset controller|aborting)",
    ),
    *_to_look_at(
        "network-queue-stuck",
        "an adapter did not send for seconds",
        "network adapter",
        "look at the adapter and its driver (ethtool)",
        r"^NETDEV WATCHDOG: [\w.-]{1,15}(?: \([\w-]+\))?: transmit queue \d+ timed out",
    ),
    *_to_look_at(
        "adapter-firmware",
        "the firmware of a network adapter reports an error",
        "network adapter",
        "look at its health (devlink health) and firmware; if it repeats, have it replaced",
        r"^mlx5_core [0-9a-f:.]{7,16}: .{0,60}(?:assert_var|firmware internal error|Health issue)",
    ),
)
FAULTS = tuple(each.pattern for each in KINDS if each.status is Status.NODE_FAULT)
WARNINGS = tuple(each.pattern for each in KINDS if each.status is Status.WARN)


# `Nov 23 12:00:00 n1 kernel: `, `[  123.456789] `, `[Mon Nov 23 12:00:00 2026] `
_STAMP = re.compile(r"^(?:\S.{0,80}? kernel: )?(?:\[[^\]]{1,40}\] )?")


def without_stamp(line: str) -> str:
    """Return a line of a log file without what dmesg or syslog put before the kernel's words."""
    return _STAMP.sub("", line, count=1)


def is_evidence(line: str) -> bool:
    """Tell whether a line of the kernel's may be held against the node, whatever matches it.

    One that begins with a process may not: it says what its user has chosen.
    """
    return _OF_A_PROCESS.match(line) is None
