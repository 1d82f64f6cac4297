# SPDX-License-Identifier: Apache-2.0
"""What a check over NCCL says of a node that breaks its groups, and what that costs the others."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.played_gpu.description import Device, Fault, machine, with_faults, write
from tests.played_gpu.test_checks import check as check_nodes

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]

# Of this speed whatever else the machine does, so that times say something.
SMALL = Device(tflops=0.002, memory_gb_per_s=4.0)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `--json` says of each node, and the journal of the run."""

    verdicts: Mapping[str, Mapping[str, Any]]
    journal: Path

    def said(self, node: str, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind that a node wrote."""
        (file,) = self.journal.rglob(f"{node}.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]


def check(
    python: Path, directory: Path, devices: int, *faults: Fault, words: str = "--check=quick"
) -> Checked:
    """Check three played nodes, each with its share of these devices."""
    gpus = directory / "gpus"
    write(gpus, with_faults(machine(devices, SMALL), *faults))
    _, verdicts, _ = check_nodes(python, gpus, words, nodes=3, devices=devices)
    return Checked(verdicts=verdicts, journal=directory / "journal")


@pytest.mark.slow
def test_who_had_a_partner_that_died_stays_alive_and_the_dead_ones_signal_is_told(
    played_python: Path, tmp_path: Path
) -> None:
    dies = Fault(device=1, kind="strike_collective", value=9, after=3)

    found = check(played_python, tmp_path, 3, dies)

    levels = {node: verdict["level"] for node, verdict in found.verdicts.items()}
    assert levels == {"local0": "healthy", "local1": "faulty", "local2": "healthy"}
    assert "killed by SIGKILL" in found.verdicts["local1"]["reason"]
    for innocent in ("local0", "local2"):
        assert len(found.said(innocent, "workers_ready")) == 1
        assert not found.said(innocent, "workers_starting")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "stopped by a signal")],
)
def test_a_process_that_ends_or_stops_while_nccl_connects_is_its_nodes_fault_and_no_partners(
    played_python: Path, tmp_path: Path, number: signal.Signals, said: str
) -> None:
    struck = Fault(device=1, kind="strike_init", value=number)

    found = check(played_python, tmp_path, 3, struck)

    levels = {node: verdict["level"] for node, verdict in found.verdicts.items()}
    assert levels == {"local0": "healthy", "local1": "faulty", "local2": "healthy"}
    assert said in found.verdicts["local1"]["reason"]


@pytest.mark.slow
def test_data_that_arrives_changed_is_told_with_whose_it_was_on_which_device(
    played_python: Path, tmp_path: Path
) -> None:
    flips = Fault(device=2, kind="link_flip", value=1)

    found = check(played_python, tmp_path, 6, flips)

    levels = {node: verdict["level"] for node, verdict in found.verdicts.items()}
    assert levels == {"local0": "healthy", "local1": "faulty", "local2": "healthy"}
    assert "received other data than rank" in found.verdicts["local1"]["reason"]
    (ready, *_) = found.said("local0", "workers_ready")
    assert all("GPU-" in device and " at 0000:" in device for device in ready["devices"])
    for innocent in ("local0", "local2"):
        assert not found.said(innocent, "workers_starting")


@pytest.mark.slow
def test_an_error_of_a_device_is_told_with_its_place_and_address(
    played_python: Path, tmp_path: Path
) -> None:
    ecc = Fault(device=3, kind="sticky_error", value=214, after=300)

    found = check(played_python, tmp_path, 6, ecc)

    reason = found.verdicts["local1"]["reason"]
    (ready, *_) = found.said("local1", "workers_ready")
    assert found.verdicts["local1"]["level"] == "faulty"
    assert "uncorrectable ECC error" in reason
    assert f"device 1 is {ready['devices'][1]}" in reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl_init_hang", "link_never"])
def test_the_device_that_hangs_while_nccl_connects_a_node_is_named(
    played_python: Path, tmp_path: Path, kind: str
) -> None:
    words = "--check=node_allgather"

    found = check(played_python, tmp_path, 6, Fault(device=3, kind=kind), words=words)

    faulty = [node for node, each in found.verdicts.items() if each["level"] == "faulty"]
    assert faulty == ["local1"]
    reason = found.verdicts["local1"]["reason"]
    assert "NCCL does not initialise on device 1, even by itself" in reason
    (ready, *_) = found.said("local1", "workers_ready")
    assert f"device 1 is {ready['devices'][1]}" in reason


def test_a_device_that_never_ends_its_work_is_named_and_no_other(
    played_python: Path, tmp_path: Path
) -> None:
    hangs = Fault(device=3, kind="hang", after=60)  # it is open by then, and in its first round

    found = check(played_python, tmp_path, 6, hangs, words="--check=values,memory_copy")

    bad = [node for node, each in found.verdicts.items() if each["level"] in {"faulty", "slow"}]
    assert bad == ["local1"]
    reason = found.verdicts["local1"]["reason"]
    (ready, *_) = found.said("local1", "workers_ready")
    assert "did not finish on device 1, and was stopped: " in reason
    assert f"device 1 is {ready['devices'][1]}" in reason
    assert not any("connecting" in each for each in found.said("local1", "node_reported"))
