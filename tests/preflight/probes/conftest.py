# SPDX-License-Identifier: Apache-2.0
"""These tests load torch themselves; without it only those of light probes are collected."""

import importlib.util
from collections.abc import Iterator

import pytest

from slurm_health.preflight.agent.worker_process import end_together
from tests.preflight.probes.probe_bench import Bench

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_[!l]*.py"]


@pytest.fixture
def make() -> Iterator[type[Bench]]:
    made: list[Bench] = []

    class Made(Bench):
        def __init__(self, count: int = 1, *, nodes: int = 1, **environ: str) -> None:
            super().__init__(count, nodes=nodes, **environ)
            made.append(self)
            self.get_ready()

    yield Made
    for bench in made:
        end_together(bench.workers)
