# SPDX-License-Identifier: Apache-2.0
"""Every check on a recorded machine: the well one passes, each fault is called what it is."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.clock import ClockSource, Cpus
from slurm_health.node.checks.external import File
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.checks.kernel_log import KernelLog
from slurm_health.node.checks.memory import Edac, Memory, Swap
from slurm_health.node.checks.network import Ethernet, InfiniBand
from slurm_health.node.checks.tasks import Daemon, Load
from slurm_health.node.rules.finding import Status
from tests.node.checks.conftest import IB, find_out
from tests.support.sites import tree

NODE, USER = Status.NODE_FAULT, Status.USER_FAULT
EDAC = "/sys/devices/system/edac/mc/mc0"
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
NET, IB_0 = "/sys/class/net/eth0", IB.format(n=0)

HEALTHY: list[Check] = [
    Memory(min_total_gib=490, min_available_gib=100),
    Swap(min_total_gib=7),
    Edac(),
    Filesystem(path="/scratch", fstype="ext4", writable=True),
    Load(),
    Daemon(name="munged"),
    ClockSource(),
    Cpus(min_online=128),
    Ethernet(interface="eth0", min_speed_mbit=100000),
    InfiniBand(ports=("mlx5_0", "mlx5_1:1"), min_rate_gbit_per_s=400),
    KernelLog(),
    File(path="/scratch", kind="directory"),
    File(path="/scratch/gone", exists=False),
]


@pytest.mark.parametrize("check", HEALTHY, ids=lambda each: type(each).__name__)
def test_a_node_that_is_well_passes(check: Check, well: CheckContext) -> None:
    found = find_out(check, well)
    assert found.status is Status.PASS, found


RO_MOUNTS = {"/proc/self/mounts": "/dev/sdb1 /scratch ext4 ro,relatime 0 0\n"}
ETH = Ethernet(interface="eth0", min_speed_mbit=100000)
PORT = InfiniBand(ports=("mlx5_0",), min_rate_gbit_per_s=400)
BAD_BLOCK = "EXT4-fs error (device sda1): bad block"
KILLED = "Out of memory: Killed process 77 (python)"
FAULTS: list[tuple[Check, dict[str, str], Status, str]] = [
    (Memory(min_total_gib=1000), {}, NODE, "503.5 GiB of memory, limit 1000"),
    (Memory(min_available_gib=490), {}, USER, "available, limit 490"),
    (Swap(min_total_gib=16), {}, Status.WARN, "8 GiB of swap, limit 16"),
    (Edac(), {f"{EDAC}/ue_count": "1\n"}, NODE, "1 uncorrected memory error on mc0, limit 0"),
    (Edac(), {f"{EDAC}/ce_count": "5000\n"}, Status.WARN, "5000 corrected memory errors on mc0"),
    (Filesystem(path="/gone"), {}, NODE, "/gone is not mounted"),
    (Filesystem(path="/scratch", fstype="xfs"), {}, NODE, "is ext4, expected xfs"),
    (Filesystem(path="/scratch", writable=True), RO_MOUNTS, NODE, "/scratch is mounted read-only"),
    (Load(), {"/proc/loadavg": "900 800 700 1/900 1\n"}, Status.WARN, "load 800 over 5 min"),
    (Daemon(name="chronyd"), {}, NODE, "no process chronyd of a system account"),
    (ClockSource(), {CLOCK: "hpet\n"}, NODE, "clock source hpet"),
    (Cpus(min_online=129), {}, NODE, "128 CPUs online, limit 129"),
    (Ethernet(interface="eth9"), {}, NODE, "there is no interface eth9"),
    (ETH, {f"{NET}/operstate": "down\n"}, NODE, "eth0 is down"),
    (ETH, {f"{NET}/speed": "1000\n"}, NODE, "eth0 runs at 1000 Mbit/s, limit 100000"),
    (InfiniBand(ports=("mlx5_7",)), {}, NODE, "there is no port mlx5_7:1"),
    (PORT, {f"{IB_0}/state": "1: DOWN\n"}, NODE, "mlx5_0:1 is DOWN"),
    (PORT, {f"{IB_0}/rate": "100 Gb/sec (1X HDR)\n"}, NODE, "runs at 100 Gbit/s, limit 400"),
    (KernelLog(), {"/dev/kmsg": f"3,7,9990000000,-;{BAD_BLOCK}\n"}, NODE, BAD_BLOCK),
    (KernelLog(), {"/dev/kmsg": f"3,7,9990000000,-;{KILLED}\n"}, Status.WARN, "Out of memory"),
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
    found = find_out(check, well)
    assert found.status is status, found
    assert text in found.text


UNREADABLE: list[tuple[Check, str]] = [
    (Memory(), "/proc/meminfo"),
    (Load(), "/proc/loadavg"),
    (ClockSource(), CLOCK),
    (Cpus(min_online=1), "/sys/devices/system/cpu/online"),
    (Filesystem(path="/scratch"), "/proc/self/mounts"),
    (KernelLog(), "/dev/kmsg"),
    (Edac(), f"{EDAC}/ue_count"),
]


@pytest.mark.parametrize(("check", "path"), UNREADABLE)
def test_what_cannot_be_read_is_unmeasured_and_not_a_fault(
    check: Check, path: str, well: CheckContext
) -> None:
    well.path(path).unlink()
    found = find_out(check, well)
    assert found.status is Status.INCONCLUSIVE
    assert path.rpartition("/")[2] in found.text


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "\0\0\0"])
def test_a_garbled_file_is_unmeasured_and_not_a_fault(text: str, well: CheckContext) -> None:
    tree(well.root, {"/proc/meminfo": text})
    assert find_out(Memory(min_total_gib=1), well).status is Status.INCONCLUSIVE


def later(context: CheckContext, seconds: float) -> CheckContext:
    return msgspec.structs.replace(context, now_s=context.now_s + seconds)


def changed(well: CheckContext, count: int) -> None:
    tree(well.root, {f"{NET}/carrier_changes": f"{count}\n"})


def test_a_link_that_was_lost_since_the_last_run_is_a_warning(well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    changed(well, 500)
    assert find_out(check, well).status is Status.PASS  # all of them long ago, perhaps

    changed(well, 510)
    found = find_out(check, later(well, 300))
    assert found.status is Status.WARN
    assert found.text == "eth0 lost or gained its link 10 times since the last check"

    assert find_out(check, later(well, 600)).status is Status.PASS


def test_an_interface_that_flaps_for_hours_is_a_fault_however_often_it_is_checked(
    well: CheckContext,
) -> None:
    check, statuses = Ethernet(interface="eth0"), []
    for number in range(40):
        changed(well, 2 + number)
        statuses.append(find_out(check, later(well, 60 * number)).status)
    assert statuses[20] is Status.WARN
    assert statuses[21:] == [NODE] * 19

    assert find_out(check, later(well, 9 * 3600)).status is Status.PASS


def test_port_errors_are_told_by_what_they_grew(well: CheckContext) -> None:
    check = InfiniBand(ports=("mlx5_0",))
    assert find_out(check, well).status is Status.PASS
    tree(well.root, {f"{IB.format(n=0)}/counters/symbol_error": "5012\n"})
    found = find_out(check, later(well, 60))
    assert found.text == "mlx5_0:1: symbol_error grew by 5000 since the last check"


@pytest.mark.parametrize("other", [("mlx5_1",), ("mlx5_1:1", "mlx5_0")])
def test_each_of_two_checks_of_ports_finds_a_link_that_was_lost_and_one_that_flaps(
    well: CheckContext, other: tuple[str, ...]
) -> None:
    checks = InfiniBand(ports=("mlx5_0",)), InfiniBand(ports=other)
    for downed, status, text in (
        (0, Status.PASS, "active"),
        (7, Status.WARN, "lost its link 7 times since the last check"),
        (11, NODE, "lost its link 11 times within 6 h, limit 10"),
    ):
        files = {f"{IB.format(n=n)}/counters/link_downed": f"{downed}\n" for n in (0, 1)}
        tree(well.root, files)
        for check in checks:
            found = find_out(check, later(well, 600 * downed))
            assert found.status is status
            assert text in found.text


@pytest.mark.parametrize(
    ("check", "path", "down"),
    [
        (Ethernet(interface="eth0"), "/sys/class/net/eth0/operstate", "down\n"),
        (InfiniBand(ports=("mlx5_0",)), f"{IB.format(n=0)}/state", "1: DOWN\n"),
    ],
)
def test_a_link_that_is_down_soon_after_a_boot_is_looked_at_again(
    check: Check, path: str, down: str, well: CheckContext
) -> None:
    tree(well.root, {path: down, "/proc/uptime": "120.00 0.00\n"})
    assert find_out(check, well).status is Status.WARN
    tree(well.root, {"/proc/uptime": "700.00 0.00\n"})
    assert find_out(check, well).status is NODE


def test_a_reboot_sets_counters_back_and_nothing_is_compared_across_it(well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    find_out(check, well)
    tree(well.root, {"/proc/sys/kernel/random/boot_id": "b-2\n"})
    changed(well, 90)
    assert find_out(check, later(well, 60)).status is Status.PASS


@pytest.mark.parametrize("text", ["", "{}", "\0", '{"boot":"b-1","values":[[1,[1]]]}'])
def test_a_garbled_memory_of_the_last_run_is_as_good_as_none(text: str, well: CheckContext) -> None:
    check = Ethernet(interface="eth0")
    find_out(check, well)
    assert well.state is not None
    (kept,) = (well.state / "history").iterdir()
    kept.write_text(text)
    assert find_out(check, later(well, 60)).status is Status.PASS
