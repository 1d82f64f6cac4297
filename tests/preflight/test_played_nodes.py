# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.played_nodes import VisibleDevices, environ_of_each, share_devices

NODES = ("local0", "local1", "local2", "local3")
CUDA = "CUDA_VISIBLE_DEVICES"


def named(*names: str) -> VisibleDevices:
    return VisibleDevices(names=names)


def devices_of_each(nodes: tuple[str, ...], devices: VisibleDevices) -> list[str]:
    environs = environ_of_each(nodes, devices)
    return [environs[node][devices.variable] for node in nodes]


def test_nodes_without_accelerators_are_told_nothing() -> None:
    assert environ_of_each(NODES, named()) == {node: {} for node in NODES}


def test_devices_are_divided_among_the_nodes_by_the_names_that_the_caller_gave() -> None:
    devices = named("4", "5", "GPU-6", "GPU-7")

    assert environ_of_each(NODES[:2], devices) == {
        "local0": {CUDA: "4,5"},
        "local1": {CUDA: "GPU-6,GPU-7"},
    }


def test_devices_that_cannot_be_divided_equally_are_left_over() -> None:
    assert devices_of_each(NODES[:3], named(*"01234567")) == ["0,1", "2,3", "4,5"]


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


def test_too_few_devices_are_taken_by_turns() -> None:
    assert devices_of_each(NODES, named("0", "1", "2")) == ["0", "1", "2", "0"]


def test_devices_of_other_makers_are_chosen_by_their_own_variable() -> None:
    devices = VisibleDevices(variable="ROCR_VISIBLE_DEVICES", names=("0", "1"))

    assert environ_of_each(NODES[:2], devices)["local1"] == {"ROCR_VISIBLE_DEVICES": "1"}


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
