# SPDX-License-Identifier: Apache-2.0
"""Real lines of the kernel's log are known, and no user can make one by the names they choose."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    BLOCK_IO_ERROR,
    FAULTS,
    HUNG_TASK,
    KINDS,
    MACHINE_CHECK,
    OUT_OF_MEMORY,
    SXID,
    WARNINGS,
    XID,
    XIDS,
    all_errors,
    explained,
    is_evidence,
    of_xid,
)

# As kernels 4.18 to 6.12 and NVIDIA's drivers print them.
BROKEN = [
    "mce: [Hardware Error]: Machine check: Uncorrected error in user-access",
    "mce: [Hardware Error]: Fatal machine check on current CPU",
    "[Hardware Error]: System Fatal error.",
    "[Hardware Error]: Uncorrected, software restartable error.",
    "[Hardware Error]: Uncorrected, software containable error.",
    "Memory failure: 0x9f3a10: recovery action for dirty LRU page: Failed",
    "Memory failure: 0x9f3a10: recovery action for high-order kernel page: Ignored",
    "EXT4-fs error (device nvme0n1p2): ext4_lookup:1785: inode #2: comm ls: deleted inode: 12",
    "EXT4-fs error (device dm-0) in ext4_reserve_inode_write:5766: IO failure",
    "EXT4-fs error (device cciss!c0d0p1): ext4_find_entry:1456: inode #2: comm ls: reading",
    "EXT4-fs (sda1): Remounting filesystem read-only",
    "F2FS-fs (sdc1): Remounting filesystem read-only",
    "EXT2-fs (sda1): error: remounting filesystem read-only",
    'XFS (sdb1): metadata I/O error in "xfs_buf_ioend+0x1a" at daddr 0x1 len 8 error 5',
    "XFS (dm-1): Corruption of in-memory data (0x8) detected. Shutting down filesystem.",
    "XFS (nvme1n1): Log I/O Error (0x2) detected at xlog_ioend_work+0x6e.",
    "XFS (nvme1n1): log I/O error -5",
    "XFS (nvme1n1): Filesystem has been shut down due to log error (0x2).",
    "BTRFS: error (device sdc1) in btrfs_commit_transaction:2487: errno=-5 IO failure",
    "BTRFS: error (device sdc1: state A) in cleanup_transaction:2019: error=-5 IO failure",
    "BTRFS info (device sdc1: state EA): forced readonly",
    "Buffer I/O error on dev nvme2n1p1, logical block 70912, lost async page write",
    "Buffer I/O error on dev sdd1, logical block 0, lost sync page write",
    "BTRFS error (device sda2): bdev /dev/sda2 errs: wr 0, rd 1, flush 0, corrupt 0, gen 0",
    "BTRFS critical (device sda2: state EA): corrupt leaf: root=1 block=2 slot=3",
    "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
    "nvme nvme1: Removing after probe failure status: -19",
]
WORTH_A_LOOK = [
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1234]",
    "NMI watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1234]",
    "watchdog: Watchdog detected hard LOCKUP on cpu 3",
    "NMI watchdog: Watchdog detected hard LOCKUP on cpu 0",
    "rcu: INFO: rcu_preempt self-detected stall on CPU",
    "INFO: rcu_sched self-detected stall on CPU { 3}  (t=60000 jiffies g=1 c=2 q=3)",
    "nfs: server nas1.example.org not responding, still trying",
    "nfs: server 10.0.0.9 not responding, timed out",
    "LustreError: 167-0: s-OST0003-osc-ffff9a41b2c3d000: This client was evicted by s-OST0003; in",
    "LustreError: scratch-MDT0000-mdc-ffff9a41b2c3d000: This client was evicted by scratch-MDT0000",
    "rcu: INFO: rcu_sched detected stalls on CPUs/tasks:",
    "rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 3-... } 26 jiffies s: 1",
    "I/O error, dev nvme0n1, sector 7814037 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
    "Buffer I/O error on dev sda1, logical block 12, async page read",
    "sdb1: rw=524288, sector=62914560, nr_sectors = 8 limit=62912512",
    "sdb1: rw=0, want=62914568, limit=62912512",
    # One message of two lines, as newer kernels write it, the newest with the process.
    r"attempt to access beyond end of device\x0asdb1: rw=0, want=62914568, limit=62912512",
    r"dd: attempt to access beyond end of device\x0asdb1: rw=0, sector=1, nr_sectors = 8 limit=8",
    "attempt to access beyond end of device",
    "Remounting filesystem read-only",
    "critical medium error, dev sdb, sector 4096 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "INFO: task python:1234 blocked for more than 120 seconds.",
    "INFO: task \\xc3\\xa9tude 2:1234 blocked for more than 245 seconds.",
    "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB",
    "Out of memory: Kill process 77 (python) score 900 or sacrifice child",
    "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    "nvidia 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal)",
    "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
    "nvidia 0000:3b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Data Link",
]
CORRECTED = [
    "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)",
    "[Hardware Error]: Corrected error, no action required.",
    "[Hardware Error]: Deferred error, no action required.",
    "[Hardware Error]: CPU:2 (19:1:0) MC17_STATUS[Over|CE|MiscV|-|-|-|-|SyndV|-]: 0xd8204040000",
]
OF_DEVICES = {
    XID: "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus.",
    SXID: "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up",
    BLOCK_IO_ERROR: "blk_update_request: I/O error, dev sda, sector 123 op 0x0:(READ) flags 0x0",
}
COMM_BYTES = 15  # TASK_COMM_LEN of Linux, less the NUL
ALL = (*FAULTS, *WARNINGS, *OF_DEVICES, MACHINE_CHECK)

# What the kernel prints of a process: {comm}, {file} and {name} are what its user chose.
FORMS = [
    "{comm}[77]: segfault at 0 ip 00007f1 sp 00007ff error 4 in {file}[400000+1000] on CPU 3",
    "{comm}[77]: segfault at 0 ip 00007f1 sp 00007ff error 4 in {file}",
    "{comm}[77]: segfault at 10 ip 00 sp 00 error 4",
    "{comm}[77] bad frame in rt_sigreturn frame:00 ip:00 sp:00 orax:ff in {file}[400000+1000]",
    "{comm}[77] trap invalid opcode ip:401136 sp:7ffd0 error:0 in {file}[401000+1000]",
    "{comm}[77]: unhandled exception: SP/PC alignment, ESR 0x8a000000, in {file}[400000+1000]",
    "{comm}[77]: memfd_create() called without MFD_EXEC or MFD_NOEXEC_SEAL set",
    "{comm}[77] vsyscall attempted with vsyscall=none ip:ffffffffff600000 cs:33 sp:00",
    "{comm} (77) used greatest stack depth: 11000 bytes left",
    "{comm} (77): drop_caches: 3",
    "{comm}/77: potentially unexpected fatal signal 11.",
    "{comm} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "traps: {comm}[77] general protection fault ip:401136 sp:7ffd0 error:0 in {file}[401000+1000]",
    "traps: {comm}[77] trap divide error ip:401136 sp:7ffd0 error:0 in {file}[401000+1000]",
    "CPU: 3 PID: 77 Comm: {comm} Not tainted 6.8.0 #1",
    "[     77]  1000    77  1000   100   40960        0             0 {comm}",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/{file},task={comm},pid=77",
    "Tasks in /{file} are going to be killed due to memory.oom.group set",
    "Memory failure: 0x9f3a10: Sending SIGBUS to {comm}:77 due to hardware memory corruption",
    "warning: process `{comm}' used the deprecated sysctl system call with 1.2.",
    "process '/{file}' started with executable stack",
    'ptrace attach of "{comm}"[77] was attempted by "{file}"[78]',
    "mmap: {comm} (77): VmData 1 exceed data ulimit 0. Update limits or use boot option",
    'audit: type=1701 audit(1.0:2): auid=1000 uid=1000 pid=77 comm="{comm}" exe="/{file}" sig=11',
    "overlayfs: failed to resolve '{file}': -2",
    "cgroup: fork rejected by pids controller in /{file}",
    "EXT4-fs (loop0): mounted filesystem with ordered data mode. Opts: {file}",
    "EXT4-fs error (device loop0): ext4_lookup:1: inode #2: comm {comm}: bad block",
    "EXT4-fs (loop0): Remounting filesystem read-only",
    "XFS (loop0): Corruption of in-memory data detected. Shutting down filesystem",
    "I/O error, dev loop0, sector 0 op 0x0:(READ) flags 0x0",
    "Buffer I/O error on dev loop0, logical block 0, lost async page write",
    "BTRFS: error (device loop0) in btrfs_commit_transaction:2487: errno=-5 IO failure",
    "BTRFS info (device loop0: state EA): forced readonly",
    "XFS (loop0): log I/O error -5",
    "loop0: rw=0, want=9, limit=8",
    r"{comm}: attempt to access beyond end of device\x0aloop0: rw=0, want=9, limit=8",
    # A network namespace of one's own has interfaces of any name.
    "{name}: entered promiscuous mode",
    "{name}: renamed from {name}",
    "br0: port 1({name}) entered blocking state",
    "IPv6: ADDRCONF(NETDEV_CHANGE): {name}: link becomes ready",
]


def matching(line: str, patterns: tuple[str, ...] = ALL) -> list[str]:
    """Return the patterns that a line matches."""
    return [each for each in patterns if re.search(each, line)]


def as_in_kmsg(text: str) -> str:
    """Return bytes of a name as /dev/kmsg shows them, one record a line."""
    return "".join(
        chr(each) if 32 <= each < 127 and each != 92 else f"\\x{each:02x}"
        for each in text.encode(errors="replace")
    )


def named(text: str, most_bytes: int | None = None) -> str:
    """Return what the kernel shows of a name: no slash, and of a process no more than 15 bytes."""
    return as_in_kmsg(text.replace("/", ".").replace("\0", ".")[:most_bytes])


def in_two(line: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a process and of a file that together hold a line that counts.

    The device's name is short, so that as much as possible is in the first part; the second begins
    behind the first, or with a later word.
    """
    line = re.sub(r"nvme0n1p2|dm-\d|cciss!c0d0p1|sd[ab]\d?|PCI:[\w:.]+|[\da-f:.]{12}", "x", line)
    words = [found.start() for found in re.finditer(r"\S+", line)]
    for end in range(1, COMM_BYTES + 1):
        for start in (end, *(each for each in words if each > end)):
            yield line[:end], line[start:]


def filled(form: str, comm: str, file: str) -> str:
    """Return a line of the kernel with the names of a user."""
    comm = named(comm, COMM_BYTES)
    return form.format(comm=comm, file=named(file), name=re.sub(r"[\s:]", ".", comm))


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_tells_of_broken_hardware_is_a_fault(line: str) -> None:
    assert matching(line, FAULTS)


@pytest.mark.parametrize("line", WORTH_A_LOOK)
def test_a_line_that_a_program_may_cause_is_a_warning_and_no_fault(line: str) -> None:
    assert matching(line, WARNINGS)
    assert not matching(line, FAULTS)


@pytest.mark.parametrize("line", CORRECTED)
def test_an_error_that_the_hardware_has_corrected_is_neither(line: str) -> None:
    assert not matching(line)


@pytest.mark.parametrize(("pattern", "line"), OF_DEVICES.items())
def test_a_line_of_a_driver_is_known(pattern: str, line: str) -> None:
    assert set(matching(line)) == {pattern}


@pytest.mark.parametrize("form", FORMS)
def test_no_line_that_counts_can_be_put_together_from_names_of_a_user(form: str) -> None:
    believed = [*BROKEN, *WORTH_A_LOOK, *OF_DEVICES.values()]
    lines = {filled(form, *names) for line in believed for names in in_two(line)}

    assert [line for line in lines if matching(line)] == []


@pytest.mark.parametrize("form", FORMS)
@given(comm=st.text(max_size=15), file=st.text(max_size=60))
def test_no_name_that_a_user_chooses_makes_a_line_count(form: str, comm: str, file: str) -> None:
    assert matching(filled(form, comm, file)) == []


@given(comm=st.text(max_size=15))
def test_a_line_that_holds_a_name_behind_the_kernels_words_is_no_more_than_they_say(
    comm: str,
) -> None:
    comm = named(comm, COMM_BYTES)
    hung = f"INFO: task {comm}:77 blocked for more than 120 seconds."
    killed = f"Memory cgroup out of memory: Killed process 77 ({comm}) total-vm:1kB"

    xid = f"NVRM: Xid (PCI:0000:3b:00): 13, pid=77, name={comm}, Graphics SM Exception"

    assert set(matching(hung)) <= {HUNG_TASK}
    assert matching(killed) == [OUT_OF_MEMORY]
    assert matching(xid) == [XID]


@pytest.mark.parametrize(
    "line",
    [
        "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]",
        "EXT4-fs (a[77]: segfault at 0 ip 0 sp 0 error 4 in x): Remounting filesystem read-only",
        "Out of memory[77]: segfault at 0 ip 0 sp 0 error 4",
        "\\x1bXFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]",
        "mce: (77) used greatest stack depth: 1 bytes left",
        "x/77: potentially unexpected fatal signal 11.",
    ],
)
def test_a_line_that_begins_with_a_process_is_no_evidence_whatever_matches_it(line: str) -> None:
    assert not is_evidence(line)


@pytest.mark.parametrize("line", [*BROKEN, *WORTH_A_LOOK, *OF_DEVICES.values()])
def test_no_line_of_the_kernels_own_is_taken_for_one_of_a_process(line: str) -> None:
    assert is_evidence(line)


def test_every_pattern_begins_at_the_beginning_of_the_line() -> None:
    alternatives = [part for each in (*ALL, ANY_XID) for part in re.split(r"\|(?=\^)", each)]
    assert [each for each in alternatives if not each.startswith("^")] == []


# --- what the table of errors explains ------------------------------------------------------------


LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus."


FATAL_LINK = (
    "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021410c6 0x0)"
)


@pytest.mark.parametrize("words", ["79", "xid 79", "Xid: 79", "xid79", "xid-79", " 79 ", LOST])
def test_an_xid_is_known_by_its_number_and_by_its_line(words: str) -> None:
    found = explained(words)

    assert found is not None
    assert (found.name, found.status, found.check) == ("Xid 79", Status.NODE_FAULT, "xid")
    assert "reboot the node" in found.helps


@pytest.mark.parametrize(
    "stamp",
    ["[ 1234.567890] ", "[Mon Nov 23 12:00:00 2026] ", "Nov 23 12:00:00 n1 kernel: [ 1.2] "],
)
def test_a_line_may_stand_behind_what_dmesg_or_a_log_puts_before_it(stamp: str) -> None:
    found = explained(stamp + LOST)

    assert found is not None
    assert found.name == "Xid 79"


def test_a_whole_line_decides_what_a_number_leaves_open() -> None:
    number, line = explained("149"), explained(FATAL_LINK)

    assert number is not None
    assert line is not None
    assert (number.status, line.status) == (Status.WARN, Status.NODE_FAULT)
    assert "NETIR_LINK_EVT" in line.what
    assert line.helps == "reset the GPU"


def test_a_line_that_takes_back_what_the_driver_wanted_leaves_nothing_to_do() -> None:
    found = explained(
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1"
        " (GPU Reset Required) to 0x0 (None)"
    )

    assert found is not None
    assert (found.status, found.helps) == (Status.PASS, "nothing")
    assert "nothing more" in found.what


def test_an_xid_of_a_program_is_the_programs_and_no_nodes() -> None:
    found = explained("31")

    assert found is not None
    assert (found.whose, found.status) == ("program", Status.PASS)


def test_an_nvswitchs_error_is_judged_by_its_number_and_by_the_drivers_word() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Non-fatal, Link 28 LTSSM Fault Up"
    always, told = explained("sxid 22003"), explained(line)

    assert always is not None
    assert told is not None
    assert (always.status, told.status) == (Status.NODE_FAULT, Status.WARN)
    assert told.what == "Link 28 LTSSM Fault Up: not fatal"


def test_a_line_that_begins_with_a_process_is_held_against_no_node() -> None:
    found = explained("EXT4-fs (a[77]: segfault at 0 ip 00 sp 00 error 4 in x")

    assert found is not None
    assert (found.whose, found.status) == ("program", Status.PASS)


@pytest.mark.parametrize("words", ["9999", "all is well", "sxid", "", "-5"])
def test_what_no_check_knows_is_not_explained(words: str) -> None:
    assert explained(words) is None


def test_each_row_of_the_table_is_found_by_its_name() -> None:
    rows = list(all_errors())

    assert [explained(row.name) for row in rows] == rows
    assert len({row.name for row in rows}) == len(rows)


def test_the_table_says_what_the_checks_judge() -> None:
    told = {row.name: row.status for row in all_errors()}

    assert {f"Xid {number}": of_xid(number).status for number in XIDS}.items() <= told.items()
    for kind in KINDS:
        assert kind.pattern in (FAULTS if told[kind.name] is Status.NODE_FAULT else WARNINGS)


def test_each_row_says_whose_matter_it_is_and_what_to_do() -> None:
    assert all(row.what and row.whose and row.helps and row.source for row in all_errors())
