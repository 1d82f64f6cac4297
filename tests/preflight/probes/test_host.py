# SPDX-License-Identifier: Apache-2.0
"""A worker's machine as /sys shows it: adapters and memory nodes."""

from pathlib import Path

import pytest

from slurm_health.preflight.probes.host import numa_nodes, ports_gbit_per_s
from tests.support.rows import rows


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
    for number in range(4):
        write_port(tmp_path, f"mlx5_{number}")
    return tmp_path


def test_only_active_ports_that_speak_infiniband_or_ethernet_count(sys: Path) -> None:
    write_port(sys, "mlx5_4", state="1: DOWN")
    write_port(sys, "rdmap0s31", link_layer="Unspecified")
    write_port(sys, "mlx5_bond_0", link_layer="Ethernet", rate="200 Gb/sec (4X HDR)")
    write_port(sys, "mlx5_bond_0", port="2", state="2: INIT")

    assert ports_gbit_per_s({}, sys) == [400.0] * 4 + [200.0]
    assert ports_gbit_per_s({}, sys / "nowhere") == []


@rows
def test_the_ports_of_a_node_are_those_that_nccl_may_use(
    sys: Path, environ: dict[str, str], rates: list[float]
) -> None:
    write_port(sys, "storage_0", rate="100 Gb/sec (4X EDR)")

    assert ports_gbit_per_s(environ, sys) == rates


def test_each_numa_node_with_processors_of_the_job_is_listed(tmp_path: Path) -> None:
    allowed = sorted(numa_nodes()[min(numa_nodes())])
    for name, processors in {"node0": f"{allowed[0]}", "node1": "9000-9003", "node10": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(processors + "\n")

    assert numa_nodes(tmp_path) == {0: {allowed[0]}}
    assert list(numa_nodes(tmp_path / "none")) == [0]
