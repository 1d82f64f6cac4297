# SPDX-License-Identifier: Apache-2.0
"""What is expected of a device, and of a site that says otherwise."""

import re
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.expectations import (
    KNOWN,
    LEAST_KNOWN,
    Expectation,
    Links,
    expectation_of,
    expectations_from,
    expected_ms,
    largest_copy_ms,
    largest_matmul_ms,
)
from slurm_health.records.errors import ConfigError
from tests.support.rows import rows

PAGE = Path(__file__).parents[2] / "docs/reference/expectations.md"
PLAIN = expectations_from({}, "config.toml")
# The product that the matmul probe computes on a GPU.
FLOP = 2.0 * 8192**3
# Eight H200s with an adapter of 400 Gbit/s each.
H200 = Links(devices=8, ports_gbit_per_s=(400.0,) * 8)


def expected(model: str) -> Expectation:
    found = expectation_of(model, PLAIN)
    assert found is not None
    return found


@pytest.mark.parametrize("each", KNOWN, ids=[each.model for each in KNOWN])
def test_every_known_model_is_found_by_the_name_torch_gives_it(each: Expectation) -> None:
    assert expected(each.model) == each
    assert expected(f" {each.model.upper()}  ") == each


@rows
def test_slices_and_models_nobody_knows_are_not_judged(model: str) -> None:
    assert expectation_of(model, PLAIN) is None


@rows
def test_no_published_rate_is_near_the_limit(model: str, measured_tflop_per_s: float) -> None:
    """The best measured rates leave a sustained square product a fifth of room at least."""
    limit_ms = largest_matmul_ms(expected(model), flop=FLOP)

    assert limit_ms is not None
    assert FLOP / (measured_tflop_per_s * 1e9) < 0.81 * limit_ms


def test_a_site_adds_a_slice_of_its_own_and_silences_a_kind() -> None:
    known = expectations_from(
        {
            "NVIDIA H200 MIG 1g.18gb": {"bf16_tflop_per_s": 120},
            "NVIDIA B200": {"memory_gb_per_s": 0},
            "NVIDIA H200": {"port_fraction": 0},
        },
        "config.toml",
    )

    mine = expectation_of("NVIDIA H200 MIG 1g.18gb", known)
    assert mine is not None
    assert (mine.bf16_tflop_per_s, mine.memory_gb_per_s) == (120, 0)
    assert mine.healthy_fraction == LEAST_KNOWN
    silenced = expectation_of("NVIDIA B200", known)
    assert silenced is not None
    assert largest_copy_ms(silenced, moved_bytes=1e9) is None
    assert largest_matmul_ms(silenced, flop=FLOP) is not None
    limits = expected_ms({"n1": "NVIDIA H200"}, known, 1.0, {"n1": H200})
    assert limits.keys() & {"rail_allgather", "node_allgather"} == {"node_allgather"}


@rows
def test_what_a_site_cannot_mean_is_refused_with_its_key(table: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expectations_from(table, "/etc/slurm-health/config.toml")

    assert str(caught.value).startswith("/etc/slurm-health/config.toml: ")
    assert said in str(caught.value)


def test_the_documentation_has_the_table_of_the_code() -> None:
    row = r"^\| `(.*)` \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)

    assert rows[-len(KNOWN) :] == [
        (
            each.model,
            f"{each.bf16_tflop_per_s:g}",
            f"{each.memory_gb_per_s:g}",
            f"{each.healthy_fraction:.2f}",
            f"{each.allgather_gb_per_s:g}" if each.allgather_gb_per_s else "-",
        )
        for each in KNOWN
    ]


BYTES_PER_RANK = 128 << 20


def took_ms(busbw_gb_per_s: float, ranks: int) -> float:
    """Return what an all-gather of the probe takes at a bus bandwidth of nccl-tests."""
    return BYTES_PER_RANK * (ranks - 1) / (busbw_gb_per_s * 1e6)


def link_limits(model: str = "NVIDIA H200", **nodes: Links) -> dict[str, float]:
    found = expected_ms(dict.fromkeys(nodes, model), PLAIN, 1.0, nodes)
    return {name: ms for name, ms in found.items() if "allgather" in name}


def test_infiniband_that_is_not_used_on_any_node_is_seen_and_a_healthy_link_is_not() -> None:
    limits = link_limits(n1=H200, n2=H200)

    # By nccl-tests: NVLink 361 GB/s, one rail 42 to 48, two nodes 330 to 390.
    assert limits["node_allgather"] > 3 * took_ms(361, 8)
    assert limits["rail_allgather"] > 5 * took_ms(42, 2)
    assert limits["allgather"] > 5 * took_ms(330, 16)
    # Over PCIe, and over one Ethernet of 100 Gbit/s for all GPUs of a node.
    assert limits["node_allgather"] < took_ms(45, 8)
    assert limits["rail_allgather"] < took_ms(12.5 / 8, 2)
    assert limits["allgather"] < took_ms(12.5, 16)


def test_rails_that_share_ports_are_expected_to_share_their_rate() -> None:
    half = Links(devices=8, ports_gbit_per_s=(400.0,) * 4)

    whole_ms = link_limits(n1=H200, n2=H200)["rail_allgather"]
    assert link_limits(n1=H200, n2=half)["rail_allgather"] == pytest.approx(2 * whole_ms)


def test_nothing_is_expected_of_links_that_are_not_known() -> None:
    assert link_limits(n1=H200, n2=Links(devices=8)).keys() == {"node_allgather"}
    assert link_limits("cpu with 2 threads", n1=H200) == {}
    assert link_limits("NVIDIA L40S", n1=H200, n2=H200).keys() == {"rail_allgather"}
    alone = Links(devices=1, ports_gbit_per_s=(100.0,))
    assert link_limits("NVIDIA L40S", n1=alone).keys() >= {"allgather"}
