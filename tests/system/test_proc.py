# SPDX-License-Identifier: Apache-2.0
"""What a CPU limit costs is read from a process's cgroup and from those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.system.proc import CpuLimits, scheduled


def limits(tmp_path: Path, *mounts: str) -> CpuLimits:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("".join(f"{each}\n" for each in mounts))
    return CpuLimits(mountinfo)


def process(tmp_path: Path, cgroup: str) -> Path:
    directory = tmp_path / "17"
    directory.mkdir()
    (directory / "cgroup").write_text(cgroup)
    return directory


def stat(directory: Path, text: str) -> None:
    directory.mkdir(parents=True)
    (directory / "cpu.stat").write_text(text)


def test_the_limit_of_a_cgroup_above_counts_too(tmp_path: Path) -> None:
    mount = tmp_path / "sys"
    stat(mount / "slurmstepd.scope/job_7", "usage_usec 9\nnr_throttled 4\nthrottled_usec 2500000\n")
    stat(mount / "slurmstepd.scope/job_7/step_0", "usage_usec 9\n")
    found = limits(tmp_path, f"30 25 0:26 / {mount} rw - cgroup2 cgroup2 rw")
    rank = process(tmp_path, "0::/slurmstepd.scope/job_7/step_0\n")

    assert found.throttled_s(rank) == pytest.approx(2.5)


def test_version_1_counts_in_nanoseconds(tmp_path: Path) -> None:
    mount = tmp_path / "cpu"
    stat(mount / "slurm/job_7", "nr_periods 3\nnr_throttled 2\nthrottled_time 1500000000\n")
    found = limits(
        tmp_path,
        f"30 25 0:26 / {mount} rw - cgroup cgroup rw,cpu,cpuacct",
        f"31 25 0:27 / {tmp_path}/memory rw - cgroup cgroup rw,memory",
    )
    rank = process(tmp_path, "5:memory:/\n4:cpu,cpuacct:/slurm/job_7\n0::/\n")

    assert found.throttled_s(rank) == pytest.approx(1.5)


def test_in_a_container_only_what_is_mounted_there_is_looked_at(tmp_path: Path) -> None:
    mount = tmp_path / "sys"
    stat(mount / "step", "throttled_usec 1000000\n")
    found = limits(tmp_path, f"30 25 0:26 /pod {mount} rw - cgroup2 cgroup2 rw")

    assert found.throttled_s(process(tmp_path, "0::/pod/step\n")) == pytest.approx(1.0)


@pytest.mark.parametrize("cgroup", ["", "0::/elsewhere\n", "nonsense\n"])
def test_what_is_not_told_is_no_limit(tmp_path: Path, cgroup: str) -> None:
    found = limits(tmp_path, "torn", f"30 25 0:26 /pod {tmp_path} rw - cgroup2 cgroup2 rw")

    assert found.throttled_s(process(tmp_path, cgroup)) == 0.0
    assert found.throttled_s(tmp_path / "gone") == 0.0


def test_a_kernel_that_does_not_count_the_waits_of_threads_tells_none(tmp_path: Path) -> None:
    assert scheduled(tmp_path) == (0.0, 0.0)
    (tmp_path / "schedstat").write_text("1500000000 250000000 12\n")
    assert scheduled(tmp_path) == (1.5, 0.25)
