# SPDX-License-Identifier: Apache-2.0
"""What a node's BMC tells of power, fans and memory, in the form that ipmitool prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.vendors import Bmc
from slurm_health.node.rules.finding import Finding, Status
from slurm_health.records.errors import Unmeasured
from tests.node.checks.conftest import find_out, printing
from tests.support.sites import tree

NODE, WARN = Status.NODE_FAULT, Status.WARN


SENSORS = """\
Inlet Temp       | 04h | ok  |  7.1 | 24 degrees C
FAN1             | 41h | ok  | 29.1 | 7800 RPM
FAN2             | 42h | ns  | 29.2 | No Reading
PS1 Status       | C8h | ok  | 10.1 | Presence detected
PS Redundancy    | 02h | ok  | 19.1 | Fully Redundant
"""


EVENTS = "   1 | 11/20/26 | 09:00:00 UTC | Power Supply PS1 | Presence detected | Asserted\n"


NOW = "11/24/26 07:00:00 UTC\n"


UNCORRECTABLE = "   7 | 11/24/26 | {time} UTC | Memory DIMM_B2 | Uncorrectable ECC | Asserted\n"


def ask_bmc(
    tmp_path: Path,
    check: Bmc,
    sensors: str,
    events: str = EVENTS,
    now: str = NOW,
    place: CheckContext | None = None,
) -> Finding:
    answers = {"sdr elist": sensors, "sel elist": events, "sel time": now}
    program = printing(tmp_path, "ipmitool", answers)
    return find_out(msgspec.structs.replace(check, program=program), place or CheckContext())


def test_a_board_that_is_well_passes_with_an_empty_slot_for_a_fan(tmp_path: Path) -> None:
    found = ask_bmc(tmp_path, Bmc(), SENSORS)

    assert (found.status, found.figures) == (Status.PASS, {"sensors": 5})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ok  | 29.1 | 7800 RPM", "lcr | 29.1 | 0 RPM", "FAN1: 0 RPM (beyond its critical"),
        ("ok  | 29.1 | 7800 RPM", "cr  | 29.1 | 0 RPM", "FAN1: 0 RPM (beyond its critical"),
        ("Presence detected", "Presence detected, Power Supply AC lost", "PS1 Status: Presence"),
        ("Presence detected", "Presence detected, Failure detected", "Failure detected"),
        ("Fully Redundant", "Redundancy Lost", "PS Redundancy: Redundancy Lost"),
    ],
)
def test_a_fan_or_a_power_supply_that_failed_is_a_warning_and_a_fault_where_the_site_says_so(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    found = ask_bmc(tmp_path, Bmc(), SENSORS.replace(old, new))
    strict = ask_bmc(tmp_path, Bmc(fans="fault", power="fault"), SENSORS.replace(old, new))
    ignored = ask_bmc(tmp_path, Bmc(fans="ignore", power="ignore"), SENSORS.replace(old, new))

    assert (found.status, strict.status, ignored.status) == (WARN, NODE, Status.PASS)
    assert said in found.text


def test_what_is_beyond_its_threshold_and_neither_fan_nor_power_is_not_judged(
    tmp_path: Path,
) -> None:
    hot = SENSORS.replace("ok  |  7.1 | 24", "ucr |  7.1 | 60")

    assert ask_bmc(tmp_path, Bmc(), hot).status is Status.PASS


@pytest.mark.parametrize(
    ("time", "now", "status"),
    [
        ("06:30:00", NOW, NODE),
        ("06:30:00", NOW.replace("24/26", "24/2026"), NODE),  # as older releases write a year
        ("06:30:00", NOW.replace("11/24", "11/26"), Status.PASS),
        ("07:30:00", NOW, Status.PASS),  # in the future: the clock has been set since
        ("06:30:00", "Unspecified\n", Status.PASS),
    ],
)
def test_an_uncorrectable_memory_error_counts_while_it_is_new_by_the_clock_of_the_bmc(
    tmp_path: Path, time: str, now: str, status: Status
) -> None:
    found = ask_bmc(tmp_path, Bmc(), SENSORS, UNCORRECTABLE.format(time=time), now)

    assert found.status is status


@pytest.mark.parametrize(("returned_s", "status"), [(600, Status.PASS), (3600, NODE)])
def test_a_memory_error_from_before_a_person_returned_the_node_counts_no_more(
    tmp_path: Path, returned_s: float, status: Status
) -> None:
    files = {"proc/sys/kernel/random/boot_id": "b\n", "proc/uptime": "90000.00 0.00\n"}
    place = tree(tmp_path / "machine", files)
    place = msgspec.structs.replace(place, returned_uptime_s=90_000.0 - returned_s)
    error = UNCORRECTABLE.format(time="06:30:00")
    found = ask_bmc(tmp_path, Bmc(), SENSORS, error, place=place)

    assert found.status is status


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (UNCORRECTABLE.format(time="06:30:00").replace("Uncorrectable", "Correctable"), WARN),
        (UNCORRECTABLE.format(time="06:30:00").replace("Asserted", "Deasserted"), Status.PASS),
        (UNCORRECTABLE.format(time="06:30:00").replace("Memory DIMM", "Slot DIMM"), Status.PASS),
        (
            "   7 |  Pre-Init  |0000000012| Memory #0x87 | Uncorrectable ECC | Asserted\n",
            Status.PASS,
        ),
        ("   8 | Linux kernel panic: oops\n", Status.PASS),
    ],
)
def test_other_lines_of_the_log_convict_nobody(tmp_path: Path, line: str, status: Status) -> None:
    found = ask_bmc(tmp_path, Bmc(), SENSORS, line)

    assert found.status is status


@pytest.mark.skipif(not shutil.which("ipmitool"), reason="ipmitool is not installed")
@pytest.mark.skipif(Path("/dev/ipmi0").exists(), reason="this machine has a BMC")
def test_the_real_ipmitool_without_a_bmc_is_not_measured() -> None:
    with pytest.raises(Unmeasured, match="ipmitool sdr elist: Could not open device"):
        Bmc().measure(CheckContext())
