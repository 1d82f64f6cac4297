# SPDX-License-Identifier: Apache-2.0
"""Light probes and GPUs: what the driver alone shows of a job's devices, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.records import Sampled, WorkersReady
from slurm_health.system import journal
from tests.played_gpu import build
from tests.played_gpu.description import Device, Fault, machine, read, strike, write
from tests.played_gpu.test_checks import BAD, HEALTHY, INCONCLUSIVE, check, levels

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
NODES, EACH = 7, 2
# So slow that a busy CPU that plays it is still faster: its times are the described ones.
GB_PER_S = 0.2
DEVICE = Device(name="Played GPU", memory_bytes=1 << 30, link_gb_per_s=GB_PER_S)
LIGHT = ("--check=light", "--round-deadline=60")
# Of the second device of three of the nodes: what is done to it, what the node is called for it,
# and in which words.
FAULTS = {
    "as it opens, copies and is reached": (
        (Fault(device=5, kind="open_error", value=999), "faulty", "{me} does not open: unknown er"),
        (
            Fault(device=7, kind="wrong_memory", value=1),
            "faulty",
            "data changed on its way from the host to {me} and back: ",
        ),
        (
            Fault(device=9, kind="peer_error", value=217),
            "faulty",
            r"device 0 \(.*\) does not reach {me}, though it says it does: ",
        ),
    ),
    "while it copies": (
        (Fault(device=5, kind="hang", after=2), "faulty", "{me} hangs in a copy, while others"),
        (
            Fault(device=7, kind="sticky_error", value=214, after=3),
            "faulty",
            "{me} failed while data was copied: uncorrectable ECC error",
        ),
        (Fault(device=9, kind="link_flip", value=1), "faulty", r"on its way from .* to {me}: 1 of"),
    ),
    "by being slow": (
        (
            Fault(device=5, kind="slow_host", value=GB_PER_S / 4),
            "slow",
            "host_copy to_(device|host):device 1 .*; device 1 is {name}",
        ),
        (Fault(device=7, kind="link_slow", value=GB_PER_S / 4), "slow", "peer_copy:device [01] "),
        (
            Fault(device=9, kind="off_bus", after=3),
            "faulty",
            "{me} (failed while data was copied|does not open): ",
        ),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _driver(played_python: Path) -> Iterator[None]:
    """Have the played driver found as NVIDIA's is: by processes that have nothing of torch."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("LD_LIBRARY_PATH", str(build.ready(played_python.parents[1])))
        yield


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    path = tmp_path / "gpus"
    write(path, machine(NODES * EACH, DEVICE, seed=str(tmp_path)))
    speeds = [Fault(device=each, kind="slow_host", value=GB_PER_S) for each in range(NODES * EACH)]
    strike(path, *speeds)
    return path


def named(gpus: Path, device: int) -> str:
    """Model, identifier and PCI address of a device."""
    played = read(gpus).devices[device]
    return f"{played.name} {played.uuid} at {played.pci_address}"


def test_devices_that_are_well_pass_and_what_was_not_tested_is_said(
    played_python: Path, gpus: Path
) -> None:
    code, nodes, said = check(played_python, gpus, *LIGHT, nodes=2, devices=4)
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    assert "NCCL and GPUs under load were not tested, only that GPUs open and copy" in said
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    written = [each.record for each in journal.read_all(run, "local1")]
    samples = [each for each in written if isinstance(each, Sampled)]
    rates = {
        (each.probe, each.quantity): [
            each.total_bytes / min(times_ms) / 1e6 for times_ms in each.iteration_ms
        ]
        for each in samples
        if each.probe in {"host_copy", "peer_copy"}
    }
    both = pytest.approx([GB_PER_S] * EACH, rel=0.05)
    assert rates == {
        ("host_copy", "to_device"): both,
        ("host_copy", "to_host"): both,
        ("peer_copy", ""): both,
    }
    (ready,) = [each for each in written if isinstance(each, WorkersReady)]
    assert ready.gpus == [named(gpus, 2), named(gpus, 3)]


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_broken_device_is_named_and_no_other(
    played_python: Path, gpus: Path, faults: tuple[tuple[Fault, str, str], ...]
) -> None:
    strike(gpus, *(fault for fault, _, _ in faults))
    code, nodes, said = check(played_python, gpus, *LIGHT, nodes=NODES, devices=NODES * EACH)
    expected = {f"local{fault.device // EACH}": level for fault, level, _ in faults}
    well = {f"local{number}": "healthy" for number in range(NODES)}
    assert levels(nodes) == {**well, **expected}, said
    for fault, _, words in faults:
        name = re.escape(named(gpus, fault.device))
        me = rf"device {fault.device % EACH} \({name}\)"
        reason = nodes[f"local{fault.device // EACH}"]["reason"]
        assert re.search(words.format(me=me, name=name), reason), said
    assert code == BAD


def test_what_is_no_fault_of_a_device_accuses_nobody(played_python: Path, gpus: Path) -> None:
    strike(
        gpus,
        Fault(device=1, kind="open_slowly", value=3),
        Fault(device=3, kind="memory_used", value=DEVICE.memory_bytes),
        Fault(device=4, kind="open_error", value=46),
    )
    code, nodes, said = check(played_python, gpus, *LIGHT, nodes=4, devices=8)
    assert levels(nodes) == {
        "local0": "healthy",
        "local1": "inconclusive",
        "local2": "inconclusive",
        "local3": "healthy",
    }, said
    assert "out of memory" in nodes["local1"]["reason"]
    assert "does not open: " in nodes["local2"]["reason"]
    assert code == INCONCLUSIVE


def test_a_part_of_a_device_is_not_opened(played_python: Path, gpus: Path) -> None:
    strike(gpus, *(Fault(device=number, kind="mig_mode", value=1) for number in range(2)))
    code, nodes, said = check(played_python, gpus, *LIGHT, nodes=2, devices=2)
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    assert "only that GPUs" not in said
