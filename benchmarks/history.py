# SPDX-License-Identifier: Apache-2.0
"""How fast journals are indexed, and how fast their history answers, compared with the targets.

    python -m benchmarks.history                  10,000 runs of 8 nodes with 8 devices each
    python -m benchmarks.history --runs 1000 --directory DIR    fewer, kept for a look

The journals are made with the journal's own codec, as a check would have written them: one node
throttles again and again, one was faulty twice. Each answer is that of a whole process.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from tabulate import tabulate

from slurm_health.fleet.index import index_path, opened
from slurm_health.records.record_codec import encode
from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    NodeReported,
    Record,
    Rendezvous,
    RoundEnded,
    RoundStarted,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.records.verdict import Level, NodeVerdict, Outcome

_ANSWER_S = 0.2
_RUNS_PER_MIN = 2000
_PER_RUN = 8
_DEVICES = 8
_FLEET = 256
_DAYS = 180
_TIMES = 11
_LEMON, _TWICE = "gpu007", "gpu100"


def main() -> None:
    """Make the journals, index them, ask; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--directory", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = chosen.directory or Path(scratch)
        root = directory / "journals"
        began_s = time.monotonic()
        make_journals(root, chosen.runs, now_s=time.time())
        made_s = time.monotonic() - began_s
        rows = measure(directory / "cache", root, chosen.runs)
    print(f"{chosen.runs} runs of {_PER_RUN} nodes, made in {made_s:.0f} s")
    print(tabulate(rows, headers=["what", "measured", "target", ""]))


def measure(cache: Path, root: Path, runs: int) -> list[list[str]]:
    """Return the rows of the table."""
    index = index_path(root, {"XDG_CACHE_HOME": str(cache)})
    assert index is not None
    index.unlink(missing_ok=True)
    began_s = time.monotonic()
    with opened(index, root, now_s=time.time()):
        pass
    indexed_s = time.monotonic() - began_s
    per_min = 60 * runs / indexed_s
    rows = [
        [
            "indexing, runs/min",
            f"{per_min:.0f}",
            f"{_RUNS_PER_MIN}",
            _judged(per_min >= _RUNS_PER_MIN),
        ],
    ]
    rows.append(["size of the index, MB", f"{index.stat().st_size / 1e6:.0f}", "", ""])
    for words in (["history", _LEMON], ["lemons"]):
        answers = [_answer_s(words, root, cache) for _ in range(_TIMES)]
        goal = [f"{_ANSWER_S * 1e3:.0f}", _judged(median(wall for wall, _ in answers) <= _ANSWER_S)]
        told = _spread_ms([wall for wall, _ in answers])
        rows.append([f"{' '.join(words)}, ms", told, *goal])
        rows.append(["  of that on a core, ms", _spread_ms([cpu for _, cpu in answers]), "", ""])
    return rows


def _spread_ms(times_s: Sequence[float]) -> str:
    return " ... ".join(
        f"{each * 1e3:.0f}" for each in (min(times_s), median(times_s), max(times_s))
    )


def _judged(good: bool) -> str:
    return "ok" if good else "MISSED"


def _answer_s(words: Sequence[str], root: Path, cache: Path) -> tuple[float, float]:
    """Return how long a whole process took to answer, and how long a core worked for it."""
    environ = {
        **os.environ,
        "SLURM_HEALTH_JOURNAL": str(root),
        "XDG_CACHE_HOME": str(cache),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "slurm_health", *words],
        env=environ,
        capture_output=True,
        check=False,
    )
    wall_s = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in {0, 1}, done.stderr
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_journals(root: Path, runs: int, *, now_s: float) -> None:
    """Write the journals of as many jobs, over half a year that ended a day ago."""
    choice = random.Random(16)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    fleet = [f"gpu{number:03d}" for number in range(_FLEET)]
    for number in range(runs):
        time_s = now_s - 90_000 - (runs - number) * _DAYS * 86400 / runs
        _make_run(root, 1000 + number, choice.sample(fleet, _PER_RUN), time_s, choice)


def _make_run(
    root: Path, job: int, nodes: Sequence[str], time_s: float, choice: random.Random
) -> None:
    directory = root / "bench" / str(job) / "0"
    directory.mkdir(mode=0o700, parents=True)
    (root / "bench").chmod(0o700)
    slow = {_LEMON} if choice.random() < 0.4 else {_TWICE} if job % 5000 == 0 else set()
    levels = {node: Level.SLOW if node in slow else Level.HEALTHY for node in nodes}
    verdicts = [
        NodeVerdict(node=node, level=level, reason="passed with 2 partners", evidence=("round 0",))
        for node, level in levels.items()
    ]
    meet = [Rendezvous(address="10.0.0.1", port=29500)] * (len(nodes) // 2)
    pairs = [[*nodes[at : at + 2]] for at in range(0, len(nodes), 2)]
    rounds = [
        record
        for index in range(2)
        for record in (
            RoundStarted(
                round=index, name=f"round {index}", groups=pairs, rendezvous=meet, deadline_s=30.0
            ),
            RoundEnded(round=index),
        )
    ]
    start = RunStarted(
        run_id=f"{job}.0",
        job_id=job,
        attempt=0,
        cluster="bench",
        partition="gpu",
        nodes=list(nodes),
        master_node=nodes[0],
        user="ml",
    )
    finished = JobOutcome(disposition=Disposition.PROCEED, exit_code=0)
    _write(directory, "master", [start, *rounds, VerdictReached(nodes=verdicts), finished], time_s)
    ran = [ScriptStarted(script="train.sh", pid=1), ScriptEnded(exit_code=0, duration_s=3600.0)]
    _write(directory, "supervisor", ran, time_s)
    for pair in pairs:
        for node in pair:
            _write(directory, node, _node_records(node, pair, node in slow, choice), time_s)


def _node_records(
    node: str, pair: list[str], slow: bool, choice: random.Random
) -> Iterable[Record]:
    devices = [f"NVIDIA H200 {node[3:]:0>8}-0000-4000-8000-{at:012d}" for at in range(_DEVICES)]
    yield WorkersReady(
        node=node, launch=0, store_port=1, torch="2.13.0", backend="nccl", devices=devices
    )
    for index in range(2):
        times = [
            [choice.gauss(1.0, 0.01) * (1.3 if slow and rank == 5 else 1.0) for _ in range(3)]
            for rank in range(_DEVICES)
        ]
        shared = {"node": node, "round": index, "group": pair}
        yield Sampled(probe="matmul", iteration_ms=times, flop=7e11, **shared)  # type: ignore[arg-type]
        yield Sampled(probe="memory_copy", iteration_ms=times, total_bytes=10**9, **shared)  # type: ignore[arg-type]
        yield Sampled(
            probe="allgather",
            iteration_ms=[[choice.gauss(6, 0.1) for _ in range(8)] for _ in range(_DEVICES)],
            world_size=16,
            total_bytes=2**31,
            scope="pair",
            **shared,  # type: ignore[arg-type]
        )
        yield NodeReported(node=node, round=index, outcome=Outcome.MEASURED)


def _write(directory: Path, writer: str, records: Iterable[Record], time_s: float) -> None:
    path = directory / f"{writer}.jsonl"
    lines = (
        encode(record, entry_id=f"{writer}:{number}", time_s=time_s + number)
        for number, record in enumerate(records)
    )
    path.write_bytes(b"".join(lines))
    path.chmod(0o600)
    os.utime(path, (time_s, time_s))


if __name__ == "__main__":
    main()
