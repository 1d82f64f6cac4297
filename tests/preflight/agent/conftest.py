# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.records import WorkersReady
from tests.preflight.agent.agent_stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.clean_up()


@pytest.fixture
def running(stage: Stage) -> Stage:
    """A stage whose agent and workers are ready."""
    stage.begin()
    stage.start()
    stage.hears(WorkersReady)
    return stage
