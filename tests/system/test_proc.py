# SPDX-License-Identifier: Apache-2.0
"""What a CPU limit costs is read from a process's cgroup and from those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.system.proc import CpuLimits, scheduled

V2 = "30 25 0:26 {} {} rw - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("counts", "mounts", "cgroup", "throttled_s"),
    [
        pytest.param(
            {"a/job": "nr_throttled 4\nthrottled_usec 2500000\n", "a/job/step_0": "usage_usec 9\n"},
            V2.format("/", "{}"),
            "0::/a/job/step_0\n",
            2.5,
            id="a cgroup above",
        ),
        pytest.param(
            {"job": "nr_periods 3\nnr_throttled 2\nthrottled_time 1500000000\n"},
            "31 25 0:27 / /nowhere rw - cgroup cgroup rw,memory\n"
            "30 25 0:26 / {} rw - cgroup cgroup rw,cpu,cpuacct",
            "5:memory:/\n4:cpu,cpuacct:/job\n0::/\n",
            1.5,
            id="version 1, in nanoseconds",
        ),
        pytest.param(
            {"step": "throttled_usec 1000000\n"},
            V2.format("/pod", "{}"),
            "0::/pod/step\n",
            1.0,
            id="what is mounted in a container",
        ),
        *(
            pytest.param({}, f"torn\n{V2.format('/pod', '{}')}", text, 0.0, id="nothing")
            for text in ("", "0::/elsewhere\n", "nonsense\n")
        ),
    ],
)
def test_what_limits_of_processors_cost_is_read_from_cgroups(
    tmp_path: Path, counts: dict[str, str], mounts: str, cgroup: str, throttled_s: float
) -> None:
    for name, text in counts.items():
        (tmp_path / "sys" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name / "cpu.stat").write_text(text)
    (tmp_path / "mountinfo").write_text(mounts.format(tmp_path / "sys") + "\n")
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "cgroup").write_text(cgroup)

    limits = CpuLimits(tmp_path / "mountinfo")

    assert limits.throttled_s(tmp_path / "17") == pytest.approx(throttled_s)
    assert limits.throttled_s(tmp_path / "gone") == 0.0


def test_a_kernel_that_does_not_count_the_waits_of_threads_tells_none(tmp_path: Path) -> None:
    assert scheduled(tmp_path) == (0.0, 0.0)
    (tmp_path / "schedstat").write_text("1500000000 250000000 12\n")
    assert scheduled(tmp_path) == (1.5, 0.25)
