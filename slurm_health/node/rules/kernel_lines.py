# SPDX-License-Identifier: Apache-2.0
"""The one table of the kernel's lines: their meaning, the part at fault, and the remedy.

It serves the checks `xid` and `kernel-log`, `slurm-health explain`, and the evidence of a failed
job.

A user chooses the name of a process (15 bytes), of its file, and of interfaces and cgroups of their
own, and the kernel prints these, often at the beginning of a line. So every pattern here starts at
the beginning of the line, names a device by the characters that the kernel gives it and no others,
and continues with the kernel's own words right behind it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from slurm_health.node.rules.finding import Remedy, Status

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
# amdgpu 0000:c3:00.0: amdgpu: {1}socket: 0, die: 0, 2 new uncorrectable hardware errors …
_AMDGPU = r"^amdgpu [0-9a-f:]{10}\.[0-7]: (?:amdgpu: )?(?:\{\d+\} ?)?(?:socket: \d+, die: \d+, )?"
_PCI = r"(?:PCI:)?(?P<bus>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"

# Between the lines of one message, as /dev/kmsg writes it. A later line may be a file's name, so no
# message is split: a pattern holds all that comes before.
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
# Older drivers print no number for a lost GPU:
# NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.
# or, in three lines: NVRM: The NVIDIA GPU 0000:18:00.0 / NVRM: (PCI ID: 10de:2901) installed in
# this system has / NVRM: fallen off the bus and is not responding to commands.
# These are one message, whose line ends /dev/kmsg writes as \x0a; a journal has three.
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
# AMD's decoder (mce_amd) omits `mce:`, and prints corrected errors in the same place.
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


class KernelError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The meaning of one line of the kernel's log, or of one number of a table.

    Its default `status` decides: only a node fault drains. `what` happened, in the part `whose`;
    `helps` is the remedy in words, `remedy` the one that `repair` may apply, `bus` the PCI address,
    empty if the line names none. `states_severity`: the line itself states how bad it is.
    """

    name: str
    status: Status
    what: str
    whose: str
    helps: str
    check: str
    source: str
    remedy: Remedy | None = None
    bus: str = ""
    states_severity: bool = False

    @property
    def words(self) -> str:
        """What happened and, of a fault, the remedy."""
        return f"{self.what}; {self.helps}" if self.status is Status.NODE_FAULT else self.what


# --- lines of the kernel itself ------------------------------------------------------------------


class LineKind(NamedTuple):
    """A kind of line, and its meaning."""

    pattern: str
    error: KernelError


def _faults(
    name: str, what: str, whose: str, helps: str, *patterns: str, status: Status = Status.NODE_FAULT
) -> tuple[LineKind, ...]:
    error = KernelError(
        name=name,
        status=status,
        what=what,
        whose=whose,
        helps=helps,
        check="kernel-log",
        source=_KERNEL,
    )
    return tuple(LineKind(pattern, error) for pattern in patterns)


def _warnings(name: str, what: str, whose: str, helps: str, *patterns: str) -> tuple[LineKind, ...]:
    """Return lines that a program may have caused, or that may pass."""
    return _faults(name, what, whose, helps, *patterns, status=Status.WARN)


_KERNEL = "the kernel's own words"
_REPLACE_DISK = "save what is on it, test the disk (smartctl), replace it"
_CHECK_FILES = "reboot the node, check the filesystem (fsck) and test the disk below it (smartctl)"
_STALLED = (
    "look at what the processes there wait for; if it repeats without a program, test the CPU"
)
KINDS: tuple[LineKind, ...] = (
    *_faults(
        "gpu-reset-required",
        "the driver refuses to use a GPU until it is reset",
        "GPU",
        "reset the GPU (nvidia-smi --gpu-reset), or reboot the node",
        r"^NVRM: nvAssert\w+: Assertion failed: Reset required \[NV_ERR_RESET_REQUIRED\]",
        r"^NVRM: nvAssert\w+: Assertion failed: [\w ]{1,60}! GPU marked for reset\b",
    ),
    *_faults(
        "amd-gpu-worn",
        "a GPU has too many bad pages of memory to be started",
        "GPU",
        "have the GPU replaced",
        _AMDGPU
        + r"(?:RAS records:\d+ exceeds? threshold:\d+, )?GPU will not be initialized\. Replace",
    ),
    *_faults(
        "machine-check",
        "the processor met an error that it could not correct",
        "processor or memory",
        "have the processor or the memory that it names replaced (rasdaemon, mcelog)",
        MACHINE_CHECK + r".*(?:Uncorrected|uncorrected|Fatal)",
        AMD_MACHINE_CHECK,
    ),
    *_faults(
        "memory-failure",
        "a page of memory is bad, and what was in it is lost",
        "memory",
        "reboot the node and have its memory tested",
        r"^Memory failure: 0x[0-9a-f]+: recovery action for [\w/ -]+: (?:Failed|Ignored)",
    ),
    *_faults(
        "filesystem-error",
        "a filesystem is damaged, or has made itself read-only",
        "disk or filesystem",
        _CHECK_FILES,
        rf"^EXT[234]-fs error \(device {_DISK}\)",
        # The words of ext2 to ext4, F2FS and NILFS.
        rf"^[A-Z][\w-]{{1,8}} \({_DISK}\): (?:error: )?[Rr]emounting filesystem read-only",
        rf"^[A-Z][\w-]{{1,8}} \({_DISK}\): I/O error while writing superblock",
        rf"^XFS \({_DISK}\): (?:[Mm]etadata|[Ll]og) I/O [Ee]rror",
        rf"^XFS \({_DISK}\): (?:Corruption |I/O Error Detected)",
        rf"^XFS \({_DISK}\): Filesystem has been shut down due to ",
        rf"^BTRFS (?:error|critical) \(device {_BTRFS}\)",
        rf"^BTRFS: error \(device {_BTRFS}\) in \w+:\d+: err(?:no|or)=-\d",
        rf"^BTRFS info \(device {_BTRFS}\): forced readonly",
    ),
    *_faults(
        "lost-write",
        "what was written to a disk is lost",
        "disk",
        _REPLACE_DISK,
        rf"^Buffer I/O error on dev {_OWN_DISK}, logical block \d+, lost (?:a?sync )page write",
    ),
    *_faults(
        "disk-lost",
        "a disk, or an array of disks, has been given up",
        "disk",
        _REPLACE_DISK,
        r"^nvme nvme\d+: (?:controller is down|Removing after probe failure)",
        r"^nvme nvme\d+: Disabling device after reset failure: -\d",
        r"^block nvme\d+n\d+: no available path - failing I/O",
        r"^md/raid\d+:?md\d+: Disk failure on [\w!-]+(?: detected)?, failing array",
    ),
    *_warnings(
        "amd-gpu-error",
        "a GPU did not correct an error, or could not be reset",
        "GPU",
        "see whether it works (amd-smi); if it repeats, reset it, or have it replaced",
        _AMDGPU
        + r"[1-9]\d* (?:new )?uncorrectable hardware errors detected in (?:total in )?\w+ block",
        _AMDGPU + r"[Uu]ncorrectable hardware error ?\(ERREVENT_\w+\) detected",
        _AMDGPU + r"GPU (?:Recovery Failed: |reset end with ret = )-\d",
    ),
    *_warnings(
        "soft-lockup",
        "a processor ran kernel code for many seconds without a pause",
        "kernel or program",
        _STALLED,
        r"^(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#\d",
    ),
    *_warnings(
        "hard-lockup",
        "a processor did not even take interrupts for many seconds",
        "kernel or processor",
        _STALLED,
        r"^(?:NMI )?watchdog: Watchdog detected hard LOCKUP on cpu \d",
    ),
    *_warnings(
        "rcu-stall",
        "a processor held up the kernel's housekeeping",
        "kernel or program",
        _STALLED,
        r"^(?:rcu: )?INFO: rcu_\w+ (?:self-)?detected (?:expedited )?stalls? on CPU",
    ),
    *_warnings(
        "hung-task",
        "a process waits in the kernel for minutes",
        "filesystem or program",
        "look at the filesystem that the process uses: one that does not answer holds it so",
        HUNG_TASK,
    ),
    *_warnings(
        "filesystem-server",
        "the server of a filesystem does not answer this client, or has evicted it",
        "server, network or client",
        "ask whether other nodes have it: then it is the server; else look at this node's network",
        r"^nfs: server [\w.:-]{1,255} not responding",
        r"^LustreError: (?:[\w-]+: )?[\w.-]{1,255}: This client was evicted by ",
    ),
    *_warnings(
        "out-of-memory",
        "the kernel killed a process because memory ran out",
        "program",
        "give the job more memory, or let it use less",
        OUT_OF_MEMORY,
    ),
    *_warnings(
        "pcie-error",
        "a device met an error on its bus that was not corrected",
        "device or its slot",
        "look at the device that it names; if it repeats, have it reseated or replaced",
        PCIE_ERROR,
    ),
    *_warnings(
        "disk-io-error",
        "a disk could not read or write a block",
        "disk",
        "test the disk (smartctl)",
        BLOCK_IO_ERROR,
    ),
    *_warnings(
        "read-only",
        "a filesystem that the line does not name is read-only now, or cannot be written",
        "disk or filesystem",
        "look for filesystems that have become read-only (findmnt -O ro) and at their disks",
        r"^(?:[A-Z][\w-]{1,8}: )?Remounting filesystem read-only$",
        r"^(?:[A-Z][\w-]{1,8}: )?I/O error while writing superblock$",
    ),
    *_warnings(
        "beyond-the-end",
        "something read or wrote beyond the end of a device",
        "filesystem or partition table",
        "compare the size of the filesystem with that of its device (dumpe2fs, xfs_info, lsblk)",
        rf"^{_BEYOND}",
        # In one message with its first half, which newer kernels begin with a process. A name with
        # spaces does not match: other text of a user could read like it.
        r"^(?:[\w/:.+-]{1,15}: )?attempt to access beyond end of device"
        rf"(?:$|{_NEXT_LINE}{_BEYOND})",
    ),
    *_warnings(
        "nvme-timeout",
        "a disk did not answer in time",
        "disk",
        "test the disk (nvme smart-log); a busy one may be late once",
        r"^nvme nvme\d+: I/O .{1,60} timeout, (?:reset controller|aborting)",
    ),
    *_warnings(
        "network-queue-stuck",
        "an adapter did not send for seconds",
        "network adapter",
        "look at the adapter and its driver (ethtool)",
        r"^NETDEV WATCHDOG: [\w.-]{1,15}(?: \([\w-]+\))?: transmit queue \d+ timed out",
    ),
    *_warnings(
        "adapter-firmware",
        "the firmware of a network adapter reports an error",
        "network adapter",
        "look at its health (devlink health) and firmware; if it repeats, have it replaced",
        r"^mlx5_core [0-9a-f:.]{7,16}: .{0,60}(?:assert_var|firmware internal error|Health issue)",
    ),
)

FAULTS = tuple(kind.pattern for kind in KINDS if kind.error.status is Status.NODE_FAULT)
WARNINGS = tuple(kind.pattern for kind in KINDS if kind.error.status is Status.WARN)

# `Nov 23 12:00:00 n1 kernel: `, `kernel: `, `[  123.456789] `, `[Mon Nov 23 12:00:00 2026] `, an
# indentation
_STAMP = re.compile(r"^(?:(?:\S.{0,80}? )?kernel: )?(?:\[[^\]]{1,40}\] )? *")


def without_stamp(line: str) -> str:
    """Return a line of a log file without what dmesg or syslog put before the kernel's words."""
    return _STAMP.sub("", line, count=1)


def is_evidence(line: str) -> bool:
    """Return whether a line of the kernel's may be held against the node, whatever matches it.

    A line that begins with a process may not: its user chose the words.
    """
    return _OF_A_PROCESS.match(line) is None


# --- errors of GPUs and NVSwitches ---------------------------------------------------------------
#
# Those of GPUs (Xid) are in NVIDIA's catalogue of Xid errors, those of NVSwitches (SXid) in the
# user guide of its Fabric Manager. A number alone is a fault only if the catalogue blames the GPU,
# the board or its slot, and only a reset or a repair helps. Most are a program's own.

_RESET = "reset the GPU"
_REBOOT = "reboot the node; when it comes back, have the hardware inspected"
_REMEDIES = {_RESET: Remedy.RESET, _REBOOT: Remedy.REBOOT}
LOST = 79


def _row(
    status: Status, what: str, whose: str, helps: str, remedy: Remedy | None = None
) -> KernelError:
    return KernelError(
        name="Xid",
        status=status,
        what=what,
        whose=whose,
        helps=helps,
        check="xid",
        source="NVIDIA's catalogue of Xid errors",
        remedy=remedy or _REMEDIES.get(helps),
    )


def _gpu(what: str, helps: str = _RESET, whose: str = "GPU") -> KernelError:
    return _row(Status.NODE_FAULT, what, whose, helps)


def _look(what: str, helps: str, whose: str = "GPU", remedy: Remedy | None = None) -> KernelError:
    """Return a warning, which never drains by itself."""
    return _row(Status.WARN, what, whose, helps, remedy)


def _program(what: str, helps: str = "look at the program, with compute-sanitizer") -> KernelError:
    return _row(Status.PASS, what, "program", helps)


_LAST_LISTED = 172  # in NVIDIA's catalogue of October 2025
_BY_LINE = "the driver's whole line decides: give it to `slurm-health explain`"
_WHEN_IDLE = "reset the GPU when the node is idle"
_AGAIN = "start the job again; if it comes back on this node with other jobs, have the GPU tested"
XIDS: dict[int, KernelError] = {
    8: _program("work of a program did not end in time", _AGAIN),
    11: _program("a program's commands to the GPU were invalid"),
    13: _program("graphics engine exception, such as an access out of bounds"),
    25: _program("a program's commands to the GPU were illegal"),
    31: _program("memory page fault: an address that is not the program's"),
    32: _program("a program's commands to the GPU were corrupted", _AGAIN),
    43: _program("a program's work was stopped for an error of its own; the GPU is well"),
    45: _program(
        "a program was ended and cleaned up after", "look for the Xid or the signal before it"
    ),
    46: _gpu("GPU stopped processing"),
    48: _gpu("uncorrectable memory error"),
    54: _gpu("auxiliary power is not connected", "have the power cables inspected", "board"),
    62: _gpu("microcontroller halted"),
    63: _look("a memory row will be remapped at the next reset", _WHEN_IDLE, remedy=Remedy.RESET),
    64: _gpu("a memory row could not be remapped"),
    68: _program("exception of the video decoder", _AGAIN),
    69: _program("graphics engine class error"),
    74: _look(
        "NVLink error",
        "look at the links (nvidia-smi nvlink --status); a site that drains for it lists 74 under"
        " `fault` of its check `xid`",
        "link",
    ),
    79: _gpu("fallen off the bus", _REBOOT, "GPU, board or slot"),
    80: _program("data sent to the GPU was corrupted", _AGAIN),
    92: _look("many corrected memory errors", "have the GPU's memory tested"),
    94: _look("contained memory error: the job that met it ended", _WHEN_IDLE),
    95: _gpu("uncontained memory error"),
    109: _gpu("context switch timed out"),
    110: _gpu("security fault"),
    119: _gpu("GPU system processor does not answer"),
    120: _gpu("GPU system processor error"),
    121: _look("corrected error of the CPU link", "nothing, unless it repeats", "link"),
    136: _gpu("link training failed", whose="link"),
    137: _look(
        "privilege error on NVLink, which a program's own access to a peer can cause",
        "look at the program first",
        "program or link",
    ),
    140: _gpu("unrecovered ECC error"),
    141: _look("fast path error", "nothing, unless it repeats"),
    143: _gpu("GPU initialisation failed"),
    **dict.fromkeys(
        range(144, 151), _look("NVLink 5 error, which its sub-code decides", _BY_LINE, "link")
    ),
    154: _look("the driver changed what it wants done to recover", _BY_LINE),
    155: _gpu("NVLink: software-defined error", whose="link"),
    156: _gpu("resource retirement"),
    158: _gpu("fatal timeout"),
    167: _gpu("PCIe fatal timeout", _REBOOT, "GPU, board or slot"),
}
# The end of an NVLink 5 line: `NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x0214…`. The name of a
# process may come before it, which its user chooses: the last such words count.
_NVLINK_5 = r"(?P<unit>[A-Z][\w/]+) +(?P<word>Fatal|Nonfatal) +XC\d+ i\d+ Link -?\d+"
# Units whose fatal errors end a program and leave the GPU usable, by NVIDIA's catalogue.
_OF_A_PROGRAM = ("TLW_RX", "TLW_TX")
# A unit that reports errors of the other end of its link: when one GPU of an NVLink domain fails,
# all others report this, fatal or not.
_OF_A_PEER = ("RLW_",)
# Xid 74 of older links: `NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, …`. A process'
# name, of 15 bytes, cannot hold that. The link also goes down where its other end has failed.
_FATAL_LINK = r"NVLink: fatal error detected on (?P<link>link \d{1,3})\("
# GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
_RECOVERY = r" recovery action changed from 0x\w+ \([^)]*\) to 0x\w+ \((?P<now>[^)]*)\)$"
_RECOVERIES = {
    "GPU Reset Required": _gpu("the driver wants the GPU reset"),
    "Node Reboot Required": _gpu("the driver wants the node rebooted", _REBOOT),
    "Drain and Reset": _gpu("the driver wants the GPU drained and reset"),
    "Drain P2P": _look("the driver wants access to peers ended", _BY_LINE),
    "None": _row(Status.PASS, "the driver wants nothing more done to recover", "GPU", "nothing"),
}
# Always fatal by the guide: a reset of the GPUs does not end it.
_ALWAYS_FATAL = frozenset({12020, 22003, 22011, *range(23001, 23018)})


def of_xid(number: int, text: str = "") -> KernelError:
    """Return the meaning of an Xid.

    A number of the catalogue that the table lacks says nothing about the node; a number beyond the
    catalogue is a warning.

    Args:
        number: of the error.
        text: the rest of the driver's line, which decides some; without it they are a warning.
    """
    unknown = (
        _look("an error of a newer driver, which is not in the table here", _BY_LINE)
        if number > _LAST_LISTED
        else _program("an error that says nothing of the node")
    )
    known, stated = XIDS.get(number, unknown), False
    if number == 154 and (action := re.search(_RECOVERY, text.rstrip())):
        known = _RECOVERIES.get(action["now"], known)
    elif 144 <= number <= 150 and (links := list(re.finditer(_NVLINK_5, text))):
        unit, stated = links[-1]["unit"], True
        if unit.startswith(_OF_A_PEER):
            what = f"NVLink error ({unit}), most often of the link's other end"
            known = _look(what, "look at the GPU at the link's other end", "link")
        elif links[-1]["word"] == "Fatal" and not unit.startswith(_OF_A_PROGRAM):
            known = _gpu(f"fatal NVLink error ({unit})", whose="link")
        else:
            what = f"NVLink error ({unit}) that ends no link"
            known = _look(what, "look at the GPU and its links", "link")
    elif number == 74 and (link := re.search(_FATAL_LINK, text)):
        stated = True
        what = f"fatal NVLink error on {link['link']}: of the link, or of its other end"
        known = _look(what, "look at the GPU and its links", "link")
    return msgspec.structs.replace(known, name=f"Xid {number}", states_severity=stated)


def of_sxid(number: int, word: str = "", text: str = "") -> KernelError:
    """Return the meaning of an NVSwitch's error, by its number and the driver's own word.

    A non-fatal error stops no program; a fatal one beside it counts by itself.

    Args:
        number: of the error.
        word: `Fatal` or `Non-fatal`, empty if the driver prints neither.
        text: the rest of the driver's line.
    """
    if number in _ALWAYS_FATAL:
        known = _gpu("always fatal", _REBOOT)
    elif word == "Fatal":
        helps = "reset all GPUs and NVSwitches of the node"
        known = _row(Status.NODE_FAULT, "fatal", "", helps, Remedy.RESET)
    else:
        what = "not fatal" if word else "the driver does not state whether it is fatal"
        known = _look(what, "look at the driver's whole line, which states whether it is fatal")
    return msgspec.structs.replace(
        known,
        name=f"SXid {number}",
        what=f"{text}: {known.what}" if text else known.what,
        whose="NVSwitch or its links",
        source="the user guide of NVIDIA's Fabric Manager",
        states_severity=bool(word),
    )


# --- reading -------------------------------------------------------------------------------------

# Patterns are compiled when a line is read: a hook of a healthy node reads none.
_NUMBER = r"(?i:(?P<kind>s?xid)\s*[-:#]?\s*)?(?P<number>\d{1,5})"


def device_error(line: str) -> KernelError | None:
    """Return the error of a GPU or an NVSwitch that a line reports, with its address; else None."""
    if match := re.match(XID, line):
        known = of_xid(int(match["number"]), match["text"])
    elif match := re.match(LOST_GPU, line):
        known = of_xid(LOST)
    elif match := re.match(SXID, line):
        known = of_sxid(int(match["number"]), match["word"] or "", match["text"])
    else:
        return None
    return msgspec.structs.replace(known, bus=address(match["bus"]) if match["bus"] else "")


def lost_gpu_named(line: str) -> str:
    """Return the address in the first of the lines that report a lost GPU; empty if it is none."""
    match = re.match(LOST_GPU_NAMED, line)
    return address(match["bus"]) if match else ""


def of_line(line: str) -> KernelError | None:
    """Return the meaning of a line of the kernel; None if no check knows it."""
    if known := device_error(line):
        return known
    if not is_evidence(line):
        return KernelError(
            name="line of a process",
            what="it begins with the name of a process, which its user chooses",
            whose="program",
            check="kernel-log",
            status=Status.PASS,
            helps="look at the program; such a line is never held against a node",
            source=_KERNEL,
        )
    return next((kind.error for kind in KINDS if re.search(kind.pattern, line)), None)


def all_errors() -> Iterator[KernelError]:
    """Yield the whole table: Xids first."""
    yield from (of_xid(number) for number in sorted(XIDS))
    yield from (of_sxid(number) for number in sorted(_ALWAYS_FATAL))
    yield from {kind.error.name: kind.error for kind in KINDS}.values()


def explained(words: str) -> KernelError | None:
    """Return the meaning of a number (`79`, `xid 79`, `sxid 22003`), a name or a whole line.

    None if no check knows it.
    """
    if match := re.fullmatch(_NUMBER, words := words.strip()):
        number = int(match["number"])
        if (match["kind"] or "xid").lower() == "sxid":
            return of_sxid(number)
        return of_xid(number) if number in XIDS else None
    named = next((error for error in all_errors() if error.name == words), None)
    return named or of_line(without_stamp(words))
