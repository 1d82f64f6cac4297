# SPDX-License-Identifier: Apache-2.0
"""How long each rank of a training computed in each step, with its stage and its replica.

A case is what is true of the whole training: a rank that is slow, stages that are uneven, batches
that are. Any other rank that is named is an innocent. The judge is the one of running trainings,
fed with the recorded steps as heartbeats tell them.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.replay.source import CannotRead, Score, Source
from slurm_health.training.diagnosis.pace import DATA, STAGES, PaceAnalysis
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport, RankSample

_TRUTH: Mapping[str, frozenset[str]] = {
    "AR": frozenset({"rank 0"}),
    "SE": frozenset({STAGES, DATA}),
    "ST": frozenset({STAGES}),
}
_STEPS = 3  # in a window, the fewest that are judged


def score(directory: Path) -> Score:
    """Let each training run again, and compare who and what is named with what is true."""
    score = Score()
    for name, truth in _TRUTH.items():
        path = directory / f"trace-{name}.parquet"
        if not path.exists():
            continue
        named = _named(path)
        score.right += len(named & truth)
        score.undecided += 0 if named else len(truth)
        score.wrong += len(truth - named) if named else 0
        score.innocent += sum(each.startswith("rank ") for each in named - truth)
        if named != truth:
            score.missed.append(f"{name}: {sorted(named)}, truth {sorted(truth)}")
    return score


def _named(path: Path) -> frozenset[str]:
    table = _columns(path)
    own_s: dict[tuple[int, int], float] = defaultdict(float)  # by step and rank
    parts: dict[int, tuple[int, int]] = {}
    wanted = ("step", "rank", "stage", "dp_rank", "optype", "duration")
    for step, rank, stage, replica, kind, took_s in zip(*(table[c] for c in wanted), strict=True):
        parts[rank] = (stage, replica)
        if str(kind).endswith("-compute"):
            own_s[step, rank] += took_s
    pulse, pace = Pulse([]), PaceAnalysis()
    named: set[str] = set()
    so_far_s: dict[int, float] = defaultdict(float)
    for count, step in enumerate(sorted({step for step, _ in own_s}), start=1):
        samples = []
        for rank, (stage, replica) in parts.items():
            so_far_s[rank] += own_s[step, rank]
            samples.append(
                RankSample(
                    rank=rank,
                    steps=count,
                    own_s=so_far_s[rank],
                    own_steps=count,
                    role=f"stage {stage}",
                    replica=replica,
                )
            )
        pulse.observe(NodeReport(node="", ranks=tuple(samples)), float(count))
        if count % _STEPS == 0:
            findings = pace.close_window(pulse.programs.values())
            named |= {
                finding.name or f"rank {finding.ranks[0]}" for finding in findings if finding.ranks
            }
    return frozenset(named)


def _columns(path: Path) -> Mapping[str, Any]:
    """Return the columns of a table as lists.

    Raises:
        CannotRead: pyarrow is not installed.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as err:
        raise CannotRead(f"{path} is read with pyarrow: pip install pyarrow ({err})") from err
    columns: Mapping[str, Any] = parquet.read_table(path).to_pydict()
    return columns


SOURCES = (
    Source(
        name="StragglerAnalysis",
        place="data/trace-AR.parquet",
        anchor="all, by its own simulation",
        seen=True,
        score=lambda path: score(path.parent),
    ),
)
