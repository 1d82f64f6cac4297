# SPDX-License-Identifier: Apache-2.0
"""What `init config` drafts of links: each port's own rate, and NVLinks where all GPUs agree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from slurm_health.node import site
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.checks.network import InfiniBand
from slurm_health.node.hooks.init_config import common_nvlinks, draft
from slurm_health.system.nvml import GpuDevice
from tests.node.checks.conftest import WELL
from tests.support.sites import tree, write_site


def test_each_port_is_drafted_with_its_own_rate(tmp_path: Path) -> None:
    slow = {"/sys/class/infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)\n"}
    text, _ = draft(tree(tmp_path / "machine", {**WELL, **slow}), node="n1")

    found = site.load(write_site(tmp_path / "etc", text)).named("infiniband")

    assert found is not None
    assert found.check == InfiniBand(
        ports=("mlx5_0:1", "mlx5_1:1"), rates={"mlx5_0:1": 400, "mlx5_1:1": 100}
    )


def test_a_mount_is_drafted_to_be_written_only_where_jobs_write(tmp_path: Path) -> None:
    points = {"/": "ext4", "/boot": "ext4", "/opt/local": "xfs", "/local": "xfs", "/home": "nfs4"}
    lines = "".join(f"x {point} {kind} rw 0 0\n" for point, kind in points.items())
    lines += "x /ro xfs ro,noatime 0 0\n"
    text, _ = draft(tree(tmp_path / "machine", {**WELL, "/proc/self/mounts": lines}), node="n1")
    loaded = site.load(write_site(tmp_path / "etc", text))

    assert tomllib.loads(text)["paths"] == ["/home"]  # what every check tests, on all nodes
    found = [each.check for each in loaded.planned]
    drafted = {each.path: each.writable for each in found if isinstance(each, Filesystem)}
    assert drafted == {**dict.fromkeys(points, False), "/": True, "/local": True, "/ro": False}


def test_each_mount_is_drafted_whatever_its_path_is(tmp_path: Path) -> None:
    points = ["/.snapshots", "/a-b", "/a/b", "/data@1", "/scratch/v1.2"]
    lines = "".join(f"x {point} btrfs rw 0 0\n" for point in points)
    text, _ = draft(tree(tmp_path / "machine", {**WELL, "/proc/self/mounts": lines}), node="n1")
    loaded = site.load(write_site(tmp_path / "etc", text))

    found = [each.check for each in loaded.planned]
    assert [each.path for each in found if isinstance(each, Filesystem)] == points


@pytest.mark.parametrize(
    ("active", "drafted"), [((18, 18), 18), ((18, 17), None), ((None, None), None), ((), None)]
)
def test_nvlinks_are_drafted_where_all_gpus_have_as_many(
    active: tuple[int | None, ...], drafted: int | None
) -> None:
    devices = [GpuDevice(index=n, links_active=links) for n, links in enumerate(active)]

    assert common_nvlinks(devices) == drafted
