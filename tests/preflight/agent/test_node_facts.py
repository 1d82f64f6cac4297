# SPDX-License-Identifier: Apache-2.0

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.agent.node_facts import (
    VisibleDevices,
    chosen_interface,
    device_count,
    driver_keeps_state,
    environ_of_each,
    interface_of,
    leaf_switch,
    missing_devices,
    own_address,
    share_devices,
    usable_cpus,
    visible_devices,
)
from tests.support.rows import rows

NODES = ("local0", "local1", "local2", "local3")
CUDA = "CUDA_VISIBLE_DEVICES"


@rows
def test_the_address_is_that_of_a_usable_route_or_else_the_names(
    target: str, hostname: str, address: str
) -> None:
    assert own_address({"SLURM_LAUNCH_NODE_IPADDR": target}, hostname).startswith(address)


@rows
def test_the_interface_is_the_users_choice_or_who_chooses_is_said(
    environ: Mapping[str, str], backend: str, said: str
) -> None:
    assert chosen_interface(environ, "127.0.0.1", backend) == said


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None  # an address for documentation


@rows
def test_the_job_sees_as_many_devices_as_slurm_gave_it(
    tmp_path: Path, environ: Mapping[str, str], count: int
) -> None:
    assert device_count(environ, root=tmp_path) == count


def test_without_a_word_from_slurm_amd_accelerators_are_counted_by_the_kernel(
    tmp_path: Path,
) -> None:
    # Two processors, two dies of an Instinct MI250X, and the graphics inside of a processor.
    for number, units in enumerate((0, 0, 440, 440, 48)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nnum_xcc 1\n")

    assert device_count({}, root=tmp_path) == 2
    assert device_count({"ROCR_VISIBLE_DEVICES": "1"}, root=tmp_path) == 1


@rows
def test_devices_of_the_job_that_are_not_seen_are_said_though_slurm_tells_the_step_otherwise(
    told: str, of_the_job: int, visible: int, said: str
) -> None:
    environ = {"SLURM_GPUS_ON_NODE": told}
    assert missing_devices(environ, visible, gpus=of_the_job) == said


def test_without_a_word_from_slurm_the_driver_is_asked(tmp_path: Path) -> None:
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for name in ("0000:17:00.0", "0000:65:00.0"):
        (gpus / name).mkdir(parents=True)

    assert device_count({}, root=tmp_path) == 2
    assert visible_devices({}, root=tmp_path).names == ("0", "1")


@pytest.mark.parametrize(
    ("told", "count"),
    [("1", 1), ("100000", None), ("", None), ("many", None), ("²", None), ("0", 1)],
)
def test_a_node_has_the_cpus_of_the_job_but_not_more_than_it_may_use(
    told: str, count: int | None
) -> None:
    allowed = len(os.sched_getaffinity(0))

    assert usable_cpus({"SLURM_CPUS_ON_NODE": told}) == (count or allowed)


@rows
def test_the_leaf_switch_is_what_slurmd_tells_a_task(address: str, pattern: str, leaf: str) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_switch(environ) == leaf
    assert leaf_switch({}) == ""


def test_a_driver_keeps_its_state_where_its_persistence_daemon_runs(tmp_path: Path) -> None:
    assert not driver_keeps_state(tmp_path)

    (tmp_path / "run/nvidia-persistenced").mkdir(parents=True)
    (tmp_path / "run/nvidia-persistenced/socket").touch()

    assert driver_keeps_state(tmp_path)


def named(*names: str) -> VisibleDevices:
    return VisibleDevices(names=names)


def devices_of_each(nodes: tuple[str, ...], devices: VisibleDevices) -> list[str]:
    environs = environ_of_each(nodes, devices)
    return [environs[node][devices.variable] for node in nodes]


@rows
def test_devices_are_divided_equally_by_the_names_that_the_caller_gave(
    count: int, names: list[str], shares: list[str]
) -> None:
    for variable in (CUDA, "ROCR_VISIBLE_DEVICES"):
        devices = visible_devices({variable: ",".join(names)})
        assert devices_of_each(NODES[:count], devices) == shares
    assert environ_of_each(NODES, named()) == {node: {} for node in NODES}


def test_nodes_on_one_device_are_hosts_of_their_own_without_adapters() -> None:
    environs = environ_of_each(NODES[:2], named("GPU-1"))

    assert environs["local1"] == {
        CUDA: "GPU-1",
        "NCCL_HOSTID": "local1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }
    assert environs["local0"] == {**environs["local1"], "NCCL_HOSTID": "local0"}


@given(st.integers(1, 64), st.integers(1, 16))
def test_every_node_has_as_many_devices_as_every_other_and_shares_them_only_where_it_must(
    nodes: int, count: int
) -> None:
    names = tuple(f"local{number}" for number in range(nodes))
    devices = named(*(str(number) for number in range(count)))

    told = [each.split(",") for each in devices_of_each(names, devices)]

    assert {len(each) for each in told} == {max(1, count // nodes)}
    used = [device for each in told for device in each]
    assert set(used) <= set(devices.names)
    assert (len(set(used)) < len(used)) == share_devices(names, devices)
    separate = {"NCCL_HOSTID" in each for each in environ_of_each(names, devices).values()}
    assert separate == {share_devices(names, devices)}
