# SPDX-License-Identifier: Apache-2.0
"""Adapters as /sys shows them, on a tree like that of a node with two PCI switches a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.probes import adapters
from slurm_health.preflight.probes.adapters import Adapter, Place, ports_gbit_per_s
from slurm_health.preflight.probes.context import NotMeasured
from slurm_health.preflight.probes.nic_loopback import (
    Lane,
    environ_of,
    failure,
    lanes,
    waves,
)

# Which device and which adapter hang on the same switch, and the NUMA node of each switch.
SWITCHES = {
    "pci0000:15/0000:15:01.0": ("0000:16:00.0", "mlx5_0", "0"),
    "pci0000:37/0000:37:01.0": ("0000:38:00.0", "mlx5_1", "0"),
    "pci0000:97/0000:97:01.0": ("0000:98:00.0", "mlx5_2", "1"),
    "pci0000:b7/0000:b7:01.0": ("0000:b8:00.0", "mlx5_3", "1"),
}
DEVICES = [device for device, _, _ in SWITCHES.values()]


def write_port(sys: Path, adapter: str, *, port: str = "1", **files: str) -> None:
    base = sys / "class/infiniband" / adapter / "ports" / port
    base.mkdir(parents=True)
    told = {
        "state": "4: ACTIVE",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        **files,
    }
    for name, text in told.items():
        (base / name).write_text(text + "\n")


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for switch, (device, adapter, numa) in SWITCHES.items():
        for address in (device, device.replace(":00.0", ":01.0")):
            path = tmp_path / "devices" / switch / address
            path.mkdir(parents=True)
            (path / "numa_node").write_text(f"{numa}\n")
            (tmp_path / "bus/pci/devices" / address).symlink_to(path)
        write_port(tmp_path, adapter)
        (tmp_path / "class/infiniband" / adapter / "device").symlink_to(path)
    return tmp_path


def test_only_ports_that_nccl_would_use_are_adapters_in_use(sys: Path) -> None:
    write_port(sys, "mlx5_4", state="1: DOWN")
    write_port(sys, "rdmap0s31", link_layer="Unspecified")
    write_port(sys, "mlx5_bond_0", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    write_port(sys, "mlx5_bond_0", port="2", state="2: INIT")

    found = {each.name: each.rates_gbit_per_s for each in adapters.active(sys)}

    assert found == {f"mlx5_{index}": (400.0,) for index in range(4)} | {"mlx5_bond_0": (200.0,)}
    assert "mlx5_4" in adapters.present(sys)
    assert adapters.active(sys / "nowhere") == []


def test_the_ports_of_a_node_are_those_that_nccl_may_use(sys: Path) -> None:
    write_port(sys, "storage_0", rate="100 Gb/sec (4X EDR)")

    assert ports_gbit_per_s({}, sys) == [400.0] * 4 + [100.0]
    assert ports_gbit_per_s({"NCCL_IB_HCA": "mlx5"}, sys) == [400.0] * 4
    assert ports_gbit_per_s({"NCCL_IB_HCA": "=mlx5_2:1,mlx5_3:1"}, sys) == [400.0] * 2
    assert ports_gbit_per_s({"NCCL_IB_HCA": "ib7"}, sys) == []
    assert ports_gbit_per_s({"NCCL_HOSTID": "played-1"}, sys) == []


def test_each_adapter_is_measured_with_the_device_on_its_own_switch(sys: Path) -> None:
    devices = [adapters.place_of_pci(address, sys) for address in DEVICES]

    found = lanes(adapters.active(sys), devices)

    assert [each.devices for each in found] == [(0, 1), (1, 0), (2, 3), (3, 2)]
    backwards = lanes(adapters.active(sys), devices[::-1])
    assert [each.devices[0] for each in backwards] == [3, 2, 1, 0]


def test_the_numa_node_decides_where_the_buses_do_not_meet() -> None:
    devices = [Place("/sys/devices/pci0000:10/0000:10:00.0", numa) for numa in ("0", "1")]
    adapter = Adapter("mlx5_0", (400.0,), Place("/sys/devices/pci0000:90/0000:90:00.0", "1"))

    assert lanes([adapter], devices) == [Lane("mlx5_0", (1, 0))]
    assert lanes([adapter], [Place()]) == [Lane("mlx5_0", (0, 0))]


def test_adapters_whose_devices_differ_are_measured_at_the_same_time() -> None:
    pairs = ((0, 1), (1, 0), (2, 3), (3, 2))
    wanted = [Lane(f"mlx5_{number}", pair) for number, pair in enumerate(pairs)]

    together = [[lane.adapter for lane in wave] for wave in waves(wanted)]

    assert together == [["mlx5_0", "mlx5_2"], ["mlx5_1", "mlx5_3"]]
    assert waves([]) == []


def test_nccl_is_left_no_way_but_the_adapter() -> None:
    environ = environ_of(Lane("mlx5_3"), {"NCCL_NET": "Socket", "NCCL_IB_HCA": "mlx5", "HOME": "/"})

    assert environ == {
        "HOME": "/",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_3",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


def test_a_device_that_serves_one_process_only_is_no_reason_to_know_nothing_of_the_node() -> None:
    sample = failure(
        Lane("mlx5_0"),
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
        "Compile with TORCH_USE_CUDA_DSA to enable device-side assertions.\n",
    )

    assert (sample.quantity, sample.iteration_ms) == ("mlx5_0", ())
    assert "exclusive-process mode" in str(sample.figures["left_out"])


def test_what_an_exchange_failed_of_is_not_what_nccl_only_mentioned() -> None:
    with pytest.raises(NotMeasured, match=r"^mlx5_0: ncclSystemError: ibv_modify_qp failed$"):
        failure(Lane("mlx5_0"), "ncclSystemError: ibv_modify_qp failed\nn1:7 NCCL INFO comm freed")
