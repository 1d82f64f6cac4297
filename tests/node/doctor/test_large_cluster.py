# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a cluster's size."""

from __future__ import annotations

import math

import pytest

from slurm_health.node.doctor.advice import Urgency
from slurm_health.node.doctor.large_cluster import advise


@pytest.mark.parametrize(
    ("config", "nodes", "open_files", "said", "do"),
    [
        ({"TreeWidth": "16"}, 16_384, math.inf, "16384 nodes arrives after up to 4", "=26"),
        ({"TreeWidth": "5"}, 1_000, math.inf, "1000 nodes arrives after up to 5", "=32"),
        ({"MaxStepCount": "40"}, 8, math.inf, "MaxStepCount=40: a check takes", "=40000"),
        ({}, 16_384, 4_096, "may have 4096 files open", "LimitNOFILE=32832"),
    ],
)
def test_what_a_cluster_is_too_large_for_is_said(
    config: dict[str, str], nodes: int, open_files: float, said: str, do: str
) -> None:
    (found,) = advise(config, nodes, open_files)
    assert found.level is Urgency.LOOK
    assert said in found.text
    assert do in found.do


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        ({"TreeWidth": "50", "MaxStepCount": "40000"}, 16_384),
        ({"TreeWidth": "16", "MaxStepCount": "40000"}, 4_096),
        ({"TreeWidth": "1"}, 3),
        ({"TreeWidth": "?", "MaxStepCount": "?"}, 100_000),
        ({}, 0),
    ],
)
def test_what_fits_or_is_not_known_needs_nothing(config: dict[str, str], nodes: int) -> None:
    assert [each.level for each in advise(config, nodes, math.inf)] == [Urgency.FINE]
