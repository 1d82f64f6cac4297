# SPDX-License-Identifier: Apache-2.0
"""Checks on a recorded machine: the well one passes, each fault is called what it is."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.node.checks.check import BUILT_IN, Check, CheckContext, check_type
from slurm_health.node.checks.external import Command, Nhc, ProgramRun
from slurm_health.node.checks.kernel_log import KernelLog, Xid
from slurm_health.node.checks.network import Ethernet, InfiniBand
from slurm_health.node.rules import settings
from slurm_health.node.rules.finding import Status
from tests.node.checks.conftest import IB, find_out
from tests.reference_pages import comments
from tests.support.rows import rows
from tests.support.sites import tree

NODE = Status.NODE_FAULT
NET = "/sys/class/net/eth0"


@rows
def test_a_check_calls_what_it_finds_what_it_is(
    check: str,
    settings: dict[str, Any],
    files: dict[str, str],
    kernel: list[str],
    gone: list[str],
    finds: Status,
    text: str,
    well: CheckContext,
) -> None:
    log = "".join(f"3,9,{9990000000 + n},-;{line}\n" for n, line in enumerate(kernel))
    tree(well.root, {**files, "/dev/kmsg": log} if kernel else files)
    for path in gone:
        well.path(path).unlink()

    found = find_out(msgspec.convert(settings, check_type(check)), well)

    assert (found.status, found.text) == (finds, text)
    assert finds is not NODE or found.figures.get("xids", 1) == 1


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


def test_an_interface_that_flaps_for_hours_is_a_fault(well: CheckContext) -> None:
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
def test_two_checks_of_one_port_both_find_it(well: CheckContext, other: tuple[str, ...]) -> None:
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


# --- the kernel's log -----------------------------------------------------------------------------


def test_a_sites_own_fault_must_begin_where_a_line_does() -> None:
    """`tmpfs: Unknown parameter '...'` has any user's words in its middle."""
    with pytest.raises(ValueError, match=r"must begin with \^"):
        KernelLog(fault=("Corruption",))
    KernelLog(fault=(r"(?i)^xfs.*corruption",), warn=("anything",))


@pytest.mark.parametrize("warnings", [1, 200, 3000])
def test_no_number_of_warnings_hides_a_fault(warnings: int, well: CheckContext) -> None:
    later = (f"I/O error, dev sda, sector {n} op 0x0:(READ) {'.' * 300}" for n in range(warnings))
    lines = ["EXT4-fs (sda1): Remounting filesystem read-only", *later]
    tree(well.root, {"/dev/kmsg": "".join(f"3,7,9990000000,-;{line}\n" for line in lines)})
    found = find_out(KernelLog(), well)

    assert found.status is NODE
    assert found.text == f"{lines[0]} (kernel log)"


LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=x, GPU has fallen off the bus."


LOST_IN_THREE = (
    "NVRM: The NVIDIA GPU 0000:3b:00.0",
    "NVRM: (PCI ID: 10de:2901) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def flooded(tmp_path: Path, *lines: str, of_others: int) -> CheckContext:
    """Return a node on which these lines are followed by so many of a program on another GPU."""
    exception = "NVRM: Xid (PCI:0000:86:00): 13, pid=77, name=python, Graphics SM Warp Exception"
    later = (f"{exception} on (GPC 0, TPC {n})" for n in range(of_others))
    said = [(99_200.0, line) for line in lines] + [(99_300.0, line) for line in later]
    log = "".join(f"3,{n},{int(at_s * 1e6)},-;{line}\n" for n, (at_s, line) in enumerate(said))
    return tree(tmp_path, {"/dev/kmsg": log, "/proc/uptime": "100000.0 1.0\n"})


@pytest.mark.parametrize("of_others", [199, 200, 5000])
@pytest.mark.parametrize("lines", [(LOST,), LOST_IN_THREE])
def test_no_number_of_harmless_errors_makes_a_node_forget_a_fault(
    tmp_path: Path, lines: tuple[str, ...], of_others: int
) -> None:
    node = flooded(tmp_path, *lines, of_others=of_others)
    retested = msgspec.structs.replace(node, context="retest", drained_uptime_s=99_290.0)

    for context in (node, retested):
        found = find_out(Xid(), context)
        assert found.status is Status.NODE_FAULT
        assert "GPU 0000:3b:00" in found.text
        assert "Xid 79 on" in found.text
        assert found.figures["xids"] == 2


# --- programs of a site ---------------------------------------------------------------------------


@rows
def test_an_exit_code_means_what_the_table_says_and_nothing_else(code: int, status: Status) -> None:
    argv = ("/bin/sh", "-c", f"echo found it; exit {code}")
    check = Command(argv=argv, user_fault_codes=(5,), warn_codes=(6,))
    found = find_out(check, CheckContext(environ={}))
    assert found.status is status
    assert "found it" in found.text


def test_a_program_sees_a_path_and_slurms_variables_and_no_others() -> None:
    check = Command(argv=("/bin/sh", "-c", "echo $PATH $SLURM_JOB_ID $LD_PRELOAD_X"))
    context = CheckContext(environ={"SLURM_JOB_ID": "7", "LD_PRELOAD_X": "evil", "PATH": "/evil"})
    assert find_out(check, context).text.endswith("/usr/sbin:/usr/bin:/sbin:/bin 7")


@rows
def test_nhc_convicts_only_by_its_own_word(code: int, output: str, status: Status) -> None:
    assert Nhc().judge(ProgramRun(code=code, output=output)).status is status


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_check_that_is_named_is_there_and_says_what_it_is_for(name: str) -> None:
    kind = check_type(name)
    assert kind.__doc__
    assert set(kind.CONTEXTS) <= {"prolog", "epilog", "healthcheck", "retest"}
    assert [name for name in kind.__struct_fields__ if not comments(kind).get(name)] == []


def test_every_key_of_the_config_file_says_what_it_is_for() -> None:
    names = "Hooks Breaker Recovery Accusations Sweep Default Metrics Notify Repair CommonKeys"
    for table in (getattr(settings, name) for name in names.split()):
        assert [name for name in table.__struct_fields__ if not comments(table).get(name)] == []
