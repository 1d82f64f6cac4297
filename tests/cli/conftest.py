# SPDX-License-Identifier: Apache-2.0
"""A node with hooks, for the tests beside this file."""

import pytest

from tests.support.hooked_node import node, rack, shared, slurm, story
from tests.support.hooked_slurm import HookedSlurm

__all__ = ["node", "rack", "shared", "slurm", "story"]


@pytest.fixture
def on_n3(monkeypatch: pytest.MonkeyPatch, slurm: HookedSlurm) -> None:
    """Have commands run where n3 is this node, beside a fake Slurm."""
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
