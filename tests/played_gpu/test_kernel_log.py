# SPDX-License-Identifier: Apache-2.0
"""What the played driver writes into the kernel's log is read as a real one's."""

from pathlib import Path

import pytest

from slurm_health.node.checks.kernel_log import Xid
from slurm_health.node.rules.finding import Status
from tests.played_gpu.description import Fault, machine
from tests.played_gpu.kernel_log import loaded, records, said
from tests.support.sites import tree


@pytest.mark.parametrize(
    ("kind", "value", "status", "number"),
    [
        ("off_bus", 0, Status.NODE_FAULT, 79),
        ("open_error", 999, Status.NODE_FAULT, 119),
        ("hang", 0, Status.NODE_FAULT, 109),
        ("remap_failed", 1, Status.NODE_FAULT, 64),
        ("sticky_error", 214, Status.NODE_FAULT, 154),
        ("nvlinks_down", 2, Status.WARN, 74),
    ],
)
def test_a_fault_that_the_driver_notices_is_told_of_its_device(
    tmp_path: Path, kind: str, value: float, status: Status, number: int
) -> None:
    device = machine(2).devices[1]
    messages = [loaded(), *said(device, Fault(device=1, kind=kind, value=value))]
    log = records(messages, first=7, uptime_s=9990.0)
    node = tree(tmp_path, {"/dev/kmsg": log, "/proc/uptime": "10000.0 1\n"})
    finding = Xid().measure(node)
    assert finding.status is status, finding
    assert finding.text.startswith(f"Xid {number} on GPU 0000:21:00: ")
    assert [line.split(",")[1] for line in log.splitlines()] == [
        str(7 + count) for count in range(len(messages))
    ]
