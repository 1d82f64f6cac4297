# SPDX-License-Identifier: Apache-2.0
"""Every check on a recorded machine: the well one passes, each fault is called what it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.clock import Clock, ClockSeen, ClockSource, Cpus
from slurm_health.node.checks.ethernet import Ethernet
from slurm_health.node.checks.external import Command, File, Nagios, Nhc, ProgramSeen
from slurm_health.node.checks.filesystem import Filesystem, FilesystemSeen
from slurm_health.node.checks.infiniband import InfiniBand
from slurm_health.node.checks.kernel_log import KernelLog
from slurm_health.node.checks.memory import Edac, HugePages, Memory, Swap
from slurm_health.node.checks.services import Daemon, Unit, UnitSeen
from slurm_health.node.checks.tasks import Leftovers, Load, Uninterruptible, Zombies
from slurm_health.node.rules.finding import Finding, Status, capped
from slurm_health.records.errors import Unmeasured
from slurm_health.system.proc import parse_stat
from tests.node.checks.conftest import IB, process
from tests.support.sites import tree

NODE, USER = Status.NODE_FAULT, Status.USER_FAULT
FIELDS = "rw,relatime 0 0"


def find(check: Check, context: CheckContext) -> Finding:
    """Run a check as the hooks do: over the process boundary, and capped."""
    seen = msgspec.msgpack.encode(check.collect(context))
    return capped(check.judge(msgspec.msgpack.decode(seen, type=check.SEEN)), check.SEVERITY)


HEALTHY: list[Check] = [
    Memory(min_total_gib=490, min_available_gib=100),
    Swap(min_total_gib=7),
    Edac(),
    HugePages(),
    Filesystem(path="/scratch", fstype="ext4", writable=True),
    Load(),
    Zombies(),
    Uninterruptible(),
    Daemon(name="munged"),
    ClockSource(),
    Cpus(min_online=128),
    Ethernet(interface="eth0", min_speed_mbit=100000, full_duplex=True),
    InfiniBand(ports=("mlx5_0", "mlx5_1:1"), min_rate_gbit_per_s=400),
    InfiniBand(min_active=2),
    InfiniBand(rates={"mlx5_0": 400}, min_rate_gbit_per_s=100),
    KernelLog(),
    File(path="/scratch", kind="directory"),
    File(path="/scratch/gone", exists=False),
]


@pytest.mark.parametrize("check", HEALTHY, ids=lambda each: type(each).__name__)
def test_a_node_that_is_well_passes(check: Check, well: CheckContext) -> None:
    found = find(check, well)
    assert found.status is Status.PASS, found


FAULTS: list[tuple[Check, dict[str, str], Status, str]] = [
    (Memory(min_total_gib=1000), {}, NODE, "503.5 GiB of memory, limit 1000"),
    (Memory(min_available_gib=490), {}, USER, "available, limit 490"),
    (Swap(min_total_gib=16), {}, Status.WARN, "8 GiB of swap, limit 16"),
    (Swap(max_total_gib=0), {}, Status.WARN, "at most 0 allowed"),
    (
        Edac(),
        {"/sys/devices/system/edac/mc/mc0/ue_count": "1\n"},
        NODE,
        "mc0: 1 uncorrected memory errors, limit 0",
    ),
    (
        Edac(),
        {"/sys/devices/system/edac/mc/mc0/ce_count": "5000\n"},
        Status.WARN,
        "5000 corrected",
    ),
    (
        HugePages(),
        {"/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "1024\n"},
        USER,
        "2 GiB in huge pages, limit 0",
    ),
    (Filesystem(path="/gone"), {}, NODE, "/gone is not mounted"),
    (Filesystem(path="/scratch", fstype="xfs"), {}, NODE, "is ext4, expected xfs"),
    (
        Filesystem(path="/scratch", writable=True),
        {"/proc/self/mounts": "/dev/sdb1 /scratch ext4 ro,relatime 0 0\n"},
        NODE,
        "/scratch is mounted read-only",
    ),
    (Filesystem(path="/scratch", min_available_gib=1e9), {}, USER, "GiB left, limit 1e+09"),
    (Load(), {"/proc/loadavg": "900 800 700 1/900 1\n"}, Status.WARN, "load 800 over 5 min"),
    (Zombies(max_count=0), process(9, "dead", "Z"), Status.WARN, "1 zombies, limit 0: dead(9)"),
    (
        Uninterruptible(max_count=0),
        process(9, "ls", "D"),
        Status.WARN,
        "1 processes stuck in the kernel, limit 0: ls(9)",
    ),
    (Daemon(name="chronyd"), {}, NODE, "0 chronyd processes of a system account, limit 1"),
    (
        ClockSource(),
        {"/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        NODE,
        "clock source hpet",
    ),
    (Cpus(min_online=129), {}, NODE, "128 CPUs online, limit 129"),
    (Ethernet(interface="eth9"), {}, NODE, "there is no interface eth9"),
    (
        Ethernet(interface="eth0"),
        {"/sys/class/net/eth0/operstate": "down\n"},
        NODE,
        "eth0 is down",
    ),
    (
        Ethernet(interface="eth0", min_speed_mbit=100000),
        {"/sys/class/net/eth0/speed": "1000\n"},
        NODE,
        "eth0 runs at 1000 Mbit/s, limit 100000",
    ),
    (
        Ethernet(interface="eth0", full_duplex=True),
        {"/sys/class/net/eth0/duplex": "half\n"},
        NODE,
        "half duplex",
    ),
    (InfiniBand(ports=("mlx5_7",)), {}, NODE, "there is no port mlx5_7:1"),
    (
        InfiniBand(ports=("mlx5_0",)),
        {f"{IB.format(n=0)}/state": "1: DOWN\n"},
        NODE,
        "mlx5_0:1 is DOWN",
    ),
    (
        InfiniBand(ports=("mlx5_0",), min_rate_gbit_per_s=400),
        {f"{IB.format(n=0)}/rate": "100 Gb/sec (1X HDR)\n"},
        NODE,
        "runs at 100 Gbit/s, limit 400",
    ),
    (
        InfiniBand(rates={"mlx5_0": 400, "mlx5_1:1": 100}),
        {
            f"{IB.format(n=0)}/rate": "200 Gb/sec (4X HDR)\n",
            f"{IB.format(n=1)}/rate": "100 Gb/sec (4X EDR)\n",
        },
        NODE,
        "mlx5_0:1 runs at 200 Gbit/s, limit 400",
    ),
    (InfiniBand(min_active=3), {}, NODE, "2 of 2 ports active, limit 3"),
    (
        KernelLog(),
        {"/dev/kmsg": "3,7,9990000000,-;EXT4-fs error (device sda1): bad block\n"},
        NODE,
        "EXT4-fs error (device sda1): bad block (10 s ago)",
    ),
    (
        KernelLog(),
        {"/dev/kmsg": "3,7,9990000000,-;Out of memory: Killed process 77 (python)\n"},
        Status.WARN,
        "Out of memory",
    ),
    (File(path="/nothing"), {}, NODE, "/nothing does not exist"),
    (File(path="/scratch", exists=False), {}, NODE, "/scratch exists"),
    (File(path="/proc/meminfo", lacks="MemFree"), {}, NODE, "contains 'MemFree'"),
    (File(path="/proc/meminfo", contains="^Gone"), {}, NODE, "lacks '^Gone'"),
    (File(path="/scratch", kind="link"), {}, NODE, "is a directory, expected a link"),
    (File(path="/proc/meminfo", mode="4755"), {}, NODE, "expected 4755"),
]


@pytest.mark.parametrize(("check", "changed", "status", "text"), FAULTS)
def test_a_fault_is_called_what_it_is_with_its_numbers(
    check: Check, changed: dict[str, str], status: Status, text: str, well: CheckContext
) -> None:
    tree(well.root, changed)
    found = find(check, well)
    assert found.status is status, found
    assert text in found.text


UNREADABLE: list[tuple[Check, str]] = [
    (Memory(), "/proc/meminfo"),
    (Load(), "/proc/loadavg"),
    (ClockSource(), "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    (Cpus(min_online=1), "/sys/devices/system/cpu/online"),
    (Filesystem(path="/scratch"), "/proc/self/mounts"),
    (KernelLog(), "/dev/kmsg"),
]


@pytest.mark.parametrize(("check", "path"), UNREADABLE)
def test_what_cannot_be_read_is_unmeasured_and_not_a_fault(
    check: Check, path: str, well: CheckContext
) -> None:
    well.path(path).unlink()
    with pytest.raises(Unmeasured, match=path.rpartition("/")[2]):
        check.collect(well)


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "\0\0\0"])
def test_a_garbled_file_is_unmeasured_and_not_a_fault(text: str, well: CheckContext) -> None:
    tree(well.root, {"/proc/meminfo": text})
    with pytest.raises(Unmeasured):
        Memory(min_total_gib=1).collect(well)


def test_no_edac_driver_is_unmeasured_and_not_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unmeasured, match="EDAC driver is not loaded"):
        Edac().collect(CheckContext(root=tmp_path))


# --- counters --------------------------------------------------


def later(context: CheckContext, seconds: float) -> CheckContext:
    return msgspec.structs.replace(context, now_s=context.now_s + seconds)


def test_a_flapping_link_is_told_by_what_changed_since_the_last_run(well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    tree(well.root, {"/sys/class/net/eth0/carrier_changes": "500\n"})
    assert find(check, well).status is Status.PASS  # all of them long ago, for all one knows
    tree(well.root, {"/sys/class/net/eth0/carrier_changes": "510\n"})
    found = find(check, later(well, 300))
    assert found.status is Status.WARN
    assert "10 times in 300 s" in found.text
    assert find(check, later(well, 600)).status is Status.PASS


def test_port_errors_are_told_by_what_they_grew(well: CheckContext) -> None:
    check = InfiniBand(ports=("mlx5_0",))
    assert find(check, well).status is Status.PASS
    tree(well.root, {f"{IB.format(n=0)}/counters/symbol_error": "5012\n"})
    found = find(check, later(well, 60))
    assert "symbol_error grew by 5000 in 60 s" in found.text
    tree(well.root, {f"{IB.format(n=0)}/counters/link_downed": "1\n"})
    assert "lost its link 1 times" in find(check, later(well, 120)).text


ETHERNET = "Ethernet\n"


@pytest.mark.parametrize(
    ("layers", "slow", "status"),
    [
        ((ETHERNET, "InfiniBand\n"), "mlx5_0", Status.PASS),
        (("InfiniBand\n", "InfiniBand\n"), "mlx5_0", Status.NODE_FAULT),
        ((ETHERNET, ETHERNET), "mlx5_0", Status.NODE_FAULT),
        ((ETHERNET, ETHERNET), "mlx5_bond_0", Status.PASS),
    ],
)
def test_the_rate_of_infiniband_is_asked_of_no_ethernet_port_beside_it_and_of_no_bond(
    well: CheckContext, layers: tuple[str, str], slow: str, status: Status
) -> None:
    tree(well.root, {f"{IB.format(n=n)}/link_layer": layer for n, layer in enumerate(layers)})
    adapters = well.root / "sys/class/infiniband"
    tree(well.root, {f"{IB.format(n=0)}/rate": "50 Gb/sec (2X EDR)\n"})
    (adapters / "mlx5_0").rename(adapters / slow)

    assert find(InfiniBand(min_rate_gbit_per_s=400), well).status is status


def test_a_reboot_sets_counters_back_and_nothing_is_compared_across_it(well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    find(check, well)
    tree(
        well.root,
        {
            "/proc/sys/kernel/random/boot_id": "b-2\n",
            "/sys/class/net/eth0/carrier_changes": "90\n",
        },
    )
    assert find(check, later(well, 60)).status is Status.PASS


@pytest.mark.parametrize("text", ["", "{}", "\0", '{"time_s":1,"boot":"b-1","data":[1]}'])
def test_a_garbled_memory_of_the_last_run_is_as_good_as_none(text: str, well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    find(check, well)
    assert well.state is not None
    (kept,) = (well.state / "seen").iterdir()
    kept.write_text(text)
    assert find(check, later(well, 60)).status is Status.PASS


# --- the kernel's log --------------------------------------------------


def test_old_messages_of_the_kernel_do_not_count(well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": "3,7,1000000,-;EXT4-fs error (device sda1)\n"})
    assert find(KernelLog(window_s=3600), well).status is Status.PASS


def test_a_message_that_a_program_wrote_is_not_the_kernels(well: CheckContext) -> None:
    """Facility 1 is what `echo > /dev/kmsg` gets, whatever level the writer asks for."""
    tree(well.root, {"/dev/kmsg": "11,7,9990000000,-;EXT4-fs error (device sda1)\n"})
    assert find(KernelLog(), well).status is Status.PASS


@pytest.mark.parametrize(
    "text",
    [
        "EXT4-fs error[77]: segfault at 0 ip 0 sp 0 error 4 in EXT4-fs error",
        "traps: EXT4-fs error[77] trap invalid opcode ip:0 sp:0 error:0",
        "EXT4-fs error (device loop3): ext4_lookup:1: bad block",
        "XFS (loop0): Corruption of in-memory data detected",
        "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]",
        "EXT4-fs (a[77]: segfault at 0 ip 0 sp 0 error 4 in x): Remounting filesystem read-only",
        "Out of memory[77]: segfault at 0 ip 0 sp 0 error 4",
        "python[77]: segfault in mce: [Hardware Error]: Uncorrected",
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=7, name=EXT4-fs error (device sda1)",
    ],
)
def test_a_user_cannot_write_a_fault_into_the_kernels_log(text: str, well: CheckContext) -> None:
    """By the name of a program that crashes, or by an image that is mounted for them."""
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find(KernelLog(), well).status is Status.PASS


def test_a_sites_own_pattern_finds_nothing_in_a_line_that_begins_with_a_program(
    well: CheckContext,
) -> None:
    text = "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]"
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find(KernelLog(fault=(r"XFS.*Corruption",)), well).status is Status.PASS


@pytest.mark.parametrize(
    "text",
    [
        "EXT4-fs error (device nvme0n1p2): ext4_lookup:1: bad block",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "EXT3-fs (dm-6): error: remounting filesystem read-only",
        "XFS (sdb1): metadata I/O error in xfs_buf_ioend",
        "EXT4-fs (dm-0): I/O error while writing superblock",
        "nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
        "nvme nvme4: Disabling device after reset failure: -19",
        "block nvme0n1: no available path - failing I/O",
        "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.",
        "mce: [Hardware Error]: Machine check: Uncorrected error",
    ],
)
def test_what_the_kernel_says_of_broken_hardware_is_a_fault(text: str, well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find(KernelLog(), well).status is NODE


@pytest.mark.parametrize(
    "text",
    [
        "nvme nvme0: I/O 5 QID 2 timeout, reset controller",
        "nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller",
        "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out",
        "mlx5_core 0000:3b:00.0: print_health_info:413: Health issue observed, firmware internal",
    ],
)
def test_what_may_pass_is_a_warning(text: str, well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find(KernelLog(), well).status is Status.WARN


@pytest.mark.parametrize("line", [";;;", "x,y,z,-;EXT4-fs error", "3;EXT4-fs error", "\xff"])
def test_garbled_messages_are_passed_over(line: str, well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": f"{line}\n"})
    assert find(KernelLog(), well).status is Status.PASS


# --- filesystems --------------------------------------------------


def seen(**changes: object) -> FilesystemSeen:
    base = {"mounted": True, "fstype": "nfs4", "total_bytes": 100, "available_bytes": 50}
    return msgspec.convert({**base, **changes}, FilesystemSeen)


@pytest.mark.parametrize(
    ("number", "status"),
    [("EROFS", NODE), ("EIO", NODE), ("ESTALE", NODE), ("ENOSPC", USER), ("EDQUOT", USER)],
)
def test_a_failed_write_is_blamed_on_whoever_it_is_due_to(number: str, status: Status) -> None:
    import errno

    check = Filesystem(path="/home", writable=True)
    assert check.judge(seen(write_errno=getattr(errno, number))).status is status


def test_a_filesystem_that_squashes_root_is_not_broken() -> None:
    import errno

    check = Filesystem(path="/home", writable=True)
    assert check.judge(seen(write_errno=errno.EACCES)).status is Status.INCONCLUSIVE


def test_a_full_filesystem_is_told_in_bytes_and_in_inodes() -> None:
    check = Filesystem(path="/home", min_available_percent=60, min_free_inodes_percent=10)
    found = check.judge(seen(total_inodes=1000, free_inodes=1))
    assert found.status is USER
    assert "50 % left, limit 60 %" in found.text
    assert "0.1 % of its inodes left, limit 10 %" in found.text


@pytest.mark.parametrize(
    "full", [{"available_bytes": 1}, {"total_inodes": 1000, "free_inodes": 1}, {"write_errno": 28}]
)
def test_full_is_the_nodes_fault_where_the_site_says_so(full: dict[str, int]) -> None:
    limits = {"min_available_percent": 10, "min_free_inodes_percent": 10, "writable": True}
    check = msgspec.convert({"path": "/local", **limits}, Filesystem)
    assert check.judge(seen(**full)).status is USER
    strict = msgspec.structs.replace(check, full_is_fault=True)
    assert strict.judge(seen(**full)).status is NODE


def test_a_filesystem_without_inodes_is_not_out_of_them() -> None:
    check = Filesystem(path="/home", min_free_inodes_percent=10)
    assert check.judge(seen(total_inodes=0)).status is Status.PASS


def test_a_mount_point_with_a_space_is_found(well: CheckContext) -> None:
    tree(well.root, {"/proc/self/mounts": f"x /my\\040disk ext4 {FIELDS}\n", "/my disk/x": ""})
    assert find(Filesystem(path="/my disk"), well).status is Status.PASS


def test_nothing_is_left_behind_by_a_trial_write(well: CheckContext) -> None:
    find(Filesystem(path="/scratch", writable=True), well)
    assert [each.name for each in well.path("/scratch").iterdir()] == [".keep"]


# --- processes --------------------------------------------------


def test_a_process_may_have_brackets_and_spaces_in_its_name() -> None:
    found = parse_stat(process(7, "a) R (b c", "D")["/proc/7/stat"])
    assert (found.pid, found.name, found.state) == (7, "a) R (b c", "D")


def test_a_process_that_waits_in_the_kernel_for_a_moment_is_not_stuck(well: CheckContext) -> None:
    tree(well.root, process(9, "ls", "D"))
    check = Uninterruptible(max_count=0, apart_s=0.01)
    first = check.collect(well)
    assert [each.pid for each in first] == [9]
    tree(well.root, process(9, "ls", "S"))
    assert check.collect(well) == []


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0"}])
def test_leftovers_are_looked_for_only_after_a_users_job(
    environ: dict[str, str], well: CheckContext
) -> None:
    with pytest.raises(Unmeasured):
        Leftovers().collect(msgspec.structs.replace(well, environ=environ))


def test_leftovers_are_the_jobs_own_and_nobody_elses(well: CheckContext) -> None:
    uid = 4242
    for pid, whose, job in ((50, uid, "7"), (51, uid, "8"), (52, 4243, "7")):
        tree(
            well.root,
            {
                **process(pid, "sleep", uid=whose),
                f"/proc/{pid}/environ": f"A=1\0SLURM_JOB_ID={job}\0",
            },
        )
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(uid)}
    found = find(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is USER
    assert "sleep(50)" in found.text
    assert "sleep(51)" not in found.text
    assert "sleep(52)" not in found.text


@pytest.mark.parametrize(("uid", "status"), [(0, Status.PASS), (1000, NODE), (4242, NODE)])
def test_a_users_program_does_not_stand_in_for_a_daemon(
    uid: int, status: Status, well: CheckContext
) -> None:
    """Whoever runs jobs can give a program any name; one with the set-user-id bit stays theirs."""
    tree(well.root, process(900, "chronyd", uid=uid))
    assert find(Daemon(name="chronyd"), well).status is status


def test_a_daemon_may_be_asked_of_one_user(well: CheckContext) -> None:
    assert find(Daemon(name="munged", user="root"), well).status is Status.PASS
    found = find(Daemon(name="munged", user="nobody"), well)
    assert found.status is NODE
    assert found.text == "0 munged processes of nobody, limit 1"


def test_of_an_environment_that_its_owner_has_blown_up_only_the_beginning_is_read(
    well: CheckContext,
) -> None:
    text = f"A={'x' * (1 << 20)}\0SLURM_JOB_ID=7\0"
    tree(well.root, {**process(50, "sleep", uid=4242), "/proc/50/environ": text})
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "4242"}
    found = find(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is not USER


# --- clock, services --------------------------------------------------


def test_the_kernel_tells_its_clocks_state() -> None:
    assert Clock().collect(CheckContext()).max_error_ms >= 0


def test_a_clock_nobody_disciplines_warns() -> None:
    found = Clock().judge(ClockSeen(synchronised=False, offset_ms=0, max_error_ms=1))
    assert capped(found, Clock.SEVERITY).status is Status.WARN
    off = Clock().judge(ClockSeen(synchronised=True, offset_ms=-2500, max_error_ms=1))
    assert "-2500 ms off, limit 100" in off.text


@pytest.mark.parametrize(
    ("load", "active", "status"),
    [
        ("loaded", "active", Status.PASS),
        ("loaded", "failed", NODE),
        ("loaded", "activating", Status.WARN),
        ("not-found", "inactive", NODE),
    ],
)
def test_a_unit_is_judged_by_its_state(load: str, active: str, status: Status) -> None:
    found = Unit(unit="chronyd.service").judge(UnitSeen(load=load, active=active, sub="x"))
    assert found.status is status


# --- programs --------------------------------------------------


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, Status.PASS),
        (77, NODE),
        (5, USER),
        (6, Status.WARN),
        (1, Status.INCONCLUSIVE),
        (2, Status.INCONCLUSIVE),
        (126, Status.INCONCLUSIVE),
        (127, Status.INCONCLUSIVE),
    ],
)
def test_an_exit_code_means_what_the_table_says_and_nothing_else(
    tmp_path: Path, code: int, status: Status
) -> None:
    check = Command(
        argv=(script(tmp_path, f"echo found it; exit {code}"),),
        user_fault_codes=(5,),
        warn_codes=(6,),
    )
    found = find(check, CheckContext(environ={}))
    assert found.status is status
    assert "found it" in found.text


def test_a_program_that_dies_of_a_signal_is_inconclusive(tmp_path: Path) -> None:
    check = Command(argv=(script(tmp_path, "kill -SEGV $$"),))
    assert find(check, CheckContext()).status is Status.INCONCLUSIVE


def test_a_program_that_is_not_there_is_unmeasured() -> None:
    with pytest.raises(Unmeasured, match="not found"):
        Command(argv=("/nowhere/program",)).collect(CheckContext())


def test_a_program_sees_a_path_and_slurms_variables_and_no_others(tmp_path: Path) -> None:
    check = Command(argv=(script(tmp_path, "echo $PATH $SLURM_JOB_ID $LD_PRELOAD_X"),))
    context = CheckContext(environ={"SLURM_JOB_ID": "7", "LD_PRELOAD_X": "evil", "PATH": "/evil"})
    assert find(check, context).text.endswith("/usr/sbin:/usr/bin:/sbin:/bin 7")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, Status.PASS),
        (1, Status.WARN),
        (2, NODE),
        (3, Status.INCONCLUSIVE),
        (4, Status.INCONCLUSIVE),
    ],
)
def test_a_nagios_plugin_is_translated(tmp_path: Path, code: int, status: Status) -> None:
    check = Nagios(argv=(script(tmp_path, f"echo 'DISK: / 7%|/=7'; exit {code}"),))
    found = find(check, CheckContext())
    assert found.status is status
    assert "|" not in found.text


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "", Status.PASS),
        (1, "ERROR:  nhc:  Health check failed:  check_fs_mount:  /x not mounted", NODE),
        (1, "nhc: syntax error near unexpected token", Status.INCONCLUSIVE),
        (1, "ERROR:  nhc:  Watchdog timer unable to terminate hung process", Status.INCONCLUSIVE),
        (127, "bash: nhc: not found", Status.INCONCLUSIVE),
        (-9, "", Status.INCONCLUSIVE),
    ],
)
def test_nhc_convicts_only_by_its_own_word(code: int, output: str, status: Status) -> None:
    assert Nhc().judge(ProgramSeen(code=code, output=output)).status is status
