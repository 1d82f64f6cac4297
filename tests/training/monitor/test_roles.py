# SPDX-License-Identifier: Apache-2.0
"""What a rank has to do, as its heartbeat tells it and the agent of its node reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slurm_health.training.diagnosis.samples import RankSample
from slurm_health.training.monitor.ranks import Ranks

JOB = f"roles-{os.getpid()}"
TOLD = """
heartbeat.role("stage 3", replica=5)
for step in range(4):
    heartbeat.step(step, 0.25, tokens=4096)
"""
# The ranks of a pipeline of two stages, of which this is one, and no other runs.
GROUPS = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group(backend="fake", rank=2, world_size=4, store=FakeStore())
for ranks in ([0, 2], [1, 3]):
    dist.new_group(ranks, group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
for ranks in ([0, 1], [2, 3]):
    dist.new_group(ranks, group_desc="DATA_PARALLEL_GROUP")
for step in range(4):
    heartbeat.step(step, 0.25)
"""


@contextmanager
def training(script: str) -> Iterator[RankSample]:
    """Run a training until its node's monitor has seen it after its steps."""
    whole = f"from slurm_health import heartbeat\n{script}\nprint('there', flush=True)\ninput()"
    told = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3", "RANK": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", whole],
        env={**os.environ, **told},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        ranks = Ranks(JOB, "n1", "9")
        ranks.find()
        (now,) = ranks.sample()
        yield now
        process.communicate(b"\n")


def test_a_rank_tells_its_role_its_replica_and_its_tokens() -> None:
    with training(TOLD) as now:
        assert (now.role, now.replica, now.tokens) == ("stage 3", 5, 4 * 4096)


@pytest.mark.torch
def test_without_a_word_of_the_script_the_role_follows_from_its_process_groups() -> None:
    with training(GROUPS) as now:
        assert (now.role, now.replica) == ("pipeline 1", 0)
