# SPDX-License-Identifier: Apache-2.0
"""What optical modules tell of themselves, through ethtool and mlxlink."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.vendors import Optics
from slurm_health.node.rules.finding import Finding, Status
from tests.node.checks.conftest import find_out, printing

WARN, OPEN = Status.WARN, Status.INCONCLUSIVE


ETHTOOL = """\
	Identifier                                : 0x11 (QSFP28)
	Alarm/warning flags implemented           : Yes
	Laser bias current high alarm   (Chan 1)  : Off
	Laser rx power low alarm   (Chan 1)       : {low}
	Laser rx power low warning   (Chan 1)     : On
	Module temperature high alarm             : Off
"""


def mlxlink(**module: str) -> str:
    info = {"Temperature [C]": "52 [-10..80]", "Rx Power Current [dBm]": "1.0,1.2 [-10.41..6]"}
    output = {
        "Operational Info": {"State": "Active", "Physical state": "LinkUp"},
        "Troubleshooting Info": {"Status Opcode": module.pop("opcode", "0"), "Recommendation": "R"},
        "Module Info": {**info, **{key: text for key, text in module.items() if "[" in key}},
        "Physical Counters and BER Info": {"Effective Physical BER": module.get("ber", "15E-255")},
    }
    return json.dumps({"result": {"output": output}, "status": {"code": 0, "message": "success"}})


def ask_optics(tmp_path: Path, text: str) -> Finding:
    program = printing(tmp_path, "mlxlink", {"-d mlx5_0": text})
    return find_out(Optics(devices=("mlx5_0",), mlxlink=program), CheckContext())


@pytest.mark.parametrize(
    ("low", "status", "said"),
    [
        ("Off", Status.PASS, "no alarm of a cable or an optic"),
        ("On", WARN, "eth0: Laser rx power low alarm (Chan 1)"),
    ],
)
def test_an_alarm_of_an_optic_is_a_warning_by_its_name(
    tmp_path: Path, low: str, status: Status, said: str
) -> None:
    program = printing(tmp_path, "ethtool", {"-m eth0": ETHTOOL.format(low=low)})

    found = find_out(Optics(interfaces=("eth0",), ethtool=program), CheckContext())

    assert (found.status, found.text) == (status, said)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, Status.PASS, "no alarm"),
        ({"Temperature [C]": "N/A", "Rx Power Current [dBm]": "N/A"}, Status.PASS, "no alarm"),
        ({"Rx Power Current [dBm]": "1.0,-40 [0..0]"}, Status.PASS, "no alarm"),
        (
            {"Temperature [C]": "83 [-10..80]"},
            WARN,
            "mlx5_0: Temperature [C] 83, allowed -10 to 80",
        ),
        ({"Rx Power Current [dBm]": "1.0,-40 [-10.41..6]"}, WARN, "1.0,-40, allowed -10.41 to 6"),
        ({"ber": "3E-09"}, WARN, "bit error rate 3E-09 after correction, limit 1e-12"),
        ({"ber": "N/A"}, Status.PASS, "no alarm"),
        ({"opcode": "1024"}, WARN, "mlx5_0: R"),
    ],
)
def test_a_module_is_judged_by_its_makers_limits(
    tmp_path: Path, changes: dict[str, str], status: Status, said: str
) -> None:
    found = ask_optics(tmp_path, mlxlink(**changes))

    assert found.status is status
    assert said in found.text


def test_a_port_that_does_not_answer_says_nothing_of_the_node(tmp_path: Path) -> None:
    program = printing(tmp_path, "ethtool", {})

    unanswered = find_out(Optics(interfaces=("eth0",), ethtool=program), CheckContext())
    garbled = ask_optics(tmp_path, "-E- Failed to open device")

    assert (unanswered.status, unanswered.text) == (OPEN, "eth0: ethtool: cannot do that")
    assert garbled.status is OPEN


def test_optics_without_a_port_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match="name the ports"):
        Optics()


@pytest.mark.skipif(not shutil.which("ethtool"), reason="ethtool is not installed")
def test_the_real_ethtool_on_a_port_without_a_module_is_not_measured() -> None:
    found = find_out(Optics(interfaces=("lo",)), CheckContext())

    assert found.status is OPEN
    assert found.text.startswith("lo: ")
