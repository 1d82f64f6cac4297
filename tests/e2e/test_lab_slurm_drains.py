# SPDX-License-Identifier: Apache-2.0
"""Drains that a real Slurm sets by itself: explained, and lifted if their cause is gone."""

from __future__ import annotations

import pytest

from tests.e2e import slurm_drains

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["prolog", "spool", "rebooted", "gres"], id="quick"),
        pytest.param(["fuse", "frozen", "epilog"], marks=pytest.mark.slow, id="unkillable"),
        pytest.param(["stepd", "silent"], marks=pytest.mark.slow, id="minutes"),
    ],
)
def test_a_drain_is_explained_and_its_node_returns_two_checks_after_its_cause_is_gone(
    names: list[str],
) -> None:
    assert slurm_drains.kinds(["host"], names) == 0
