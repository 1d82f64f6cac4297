# SPDX-License-Identifier: Apache-2.0
"""How often the Localizer is right on simulated clusters, compared with DLRover's rule.

    python -m benchmarks.localize            the whole table
    python -m benchmarks.localize --quick    fewer repetitions, no cell above 512 nodes
    python -m benchmarks.localize --only leaf
    python -m benchmarks.localize --results build/localize.jsonl    goes on where it stopped

With `--results` each line is kept once it is measured, and those that are kept are not measured
again: remove the file after a change to the localisation.

Every cell is repeated with seeds 0, 1, 2, ..., so every run prints the same table. DLRover's rule
is implemented from its published description: two rounds, first neighbours, then the fastest with
the slowest; a node that failed in both is faulty, and one that took more than twice the median is a
straggler. To its advantage, it gets the network time alone, without the matrix product it adds.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, keep, kept
from benchmarks.localize_cells import Cell, cells, leaf_of, names_of
from slurm_health.preflight.localize.localizer import (
    Level,
    Localizer,
    Outcome,
    Round,
    Verdict,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster
from slurm_health.records.nodeset import fold

_FAILED_S = 3600.0  # what DLRover takes as the time of a failed check
_STRAGGLER_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one repetition came to."""

    bad: int
    found: int
    blamed: int  # healthy nodes that were convicted
    fabric: bool  # the bad leaf or path was named, and no other
    rounds: int
    slowest_round_s: float = 0.0

    @property
    def exact(self) -> bool:
        """Tell whether the convicted nodes are the bad ones and no others."""
        return self.found == self.bad and not self.blamed


def run_ours(cell: Cell, seed: int) -> Run:
    """Play one repetition with the Localizer."""
    nodes, faults, cluster, topology = _scene(cell, seed)
    settings = replace(cell.settings, seed=seed)
    known = topology if cell.leaves_known else None
    localizer = Localizer(nodes, topology=known, settings=settings)
    rounds, slowest = 0, 0.0
    while True:
        begin = time.process_time()
        round_ = localizer.next_round()
        slowest = max(slowest, time.process_time() - begin)
        if round_ is None:
            break
        rounds += 1
        answer = cluster.answer(round_)
        begin = time.process_time()
        localizer.observe(round_.index, answer)
        slowest = max(slowest, time.process_time() - begin)
    verdict = localizer.verdict()
    accused = {*verdict.named(Level.FAULTY), *verdict.named(Level.SLOW)}
    return Run(
        bad=len(faults.nodes), found=len(accused & faults.nodes),
        blamed=len(accused - faults.nodes), fabric=_fabric_named(verdict, faults, topology),
        rounds=rounds, slowest_round_s=slowest,
    )  # fmt: skip


def _scene(
    cell: Cell, seed: int
) -> tuple[list[str], Faults, SimulatedCluster, dict[str, list[str]] | None]:
    nodes = names_of(cell)
    faults = cell.faults(nodes, random.Random(f"faults {seed}"))
    topology: dict[str, list[str]] | None = None
    if cell.leaf_size:
        topology = {}
        for node in nodes:
            topology.setdefault(leaf_of(node), []).append(node)
    cluster = SimulatedCluster(
        nodes, faults=faults, weather=cell.weather, topology=topology, devices=cell.devices,
        seed=seed,
    )  # fmt: skip
    return nodes, faults, cluster, topology


def _fabric_named(
    verdict: Verdict, faults: Faults, topology: Mapping[str, Sequence[str]] | None
) -> bool:
    """Tell whether the bad leaf or path is named, a leaf by its nodes if need be."""
    by_nodes = {fold(members): leaf for leaf, members in (topology or {}).items()}
    leaves = {by_nodes.get(name, name) for leaf in verdict.leaves for name in leaf.ends}
    paths = {frozenset(path.ends) for path in verdict.paths if path.level is not Level.INCONCLUSIVE}
    return leaves == set(faults.leaves) and paths == set(faults.paths)


def run_dlrover(cell: Cell, seed: int) -> Run:
    """Play one repetition with DLRover's rule, stragglers excluded."""
    nodes, faults, cluster, _ = _scene(cell, seed)
    accused, rounds = dlrover_accuses(nodes, cluster, seed)
    return Run(
        bad=len(faults.nodes), found=len(accused & faults.nodes),
        blamed=len(accused - faults.nodes), fabric=False, rounds=rounds,
    )  # fmt: skip


def dlrover_accuses(
    nodes: Sequence[str], cluster: SimulatedCluster, seed: int
) -> tuple[set[str], int]:
    """Return whom DLRover's rule accuses, and after how many rounds."""
    passed = dict.fromkeys(nodes, False)
    took = dict.fromkeys(nodes, _FAILED_S)
    order = list(nodes)
    random.Random(f"order {seed}").shuffle(order)  # nodes join in any order
    accused: set[str] = set()
    for index in range(2):
        groups = _dlrover_groups(order, took, index)
        for result in cluster.answer(Round(index=index, groups=groups)):
            measured = result.outcome is Outcome.MEASURED
            for node in result.nodes:
                passed[node] |= measured
                if measured:
                    took[node] = min(took[node], result.shared_ms["allgather"])
        middle = statistics.median(took.values())
        accused = {node for node in nodes if not passed[node]}
        accused |= {node for node in nodes if took[node] > _STRAGGLER_FACTOR * middle}
        if accused and len(nodes) <= 3:
            accused = set(nodes)
        if not accused or len(nodes) <= 3:
            break
    return accused, index + 1


def _dlrover_groups(
    order: Sequence[str], took: Mapping[str, float], index: int
) -> tuple[tuple[str, ...], ...]:
    """Return its groups: neighbours, then fastest with slowest; an odd one makes a trio."""
    if index == 0:
        groups = [list(order[place : place + 2]) for place in range(0, len(order), 2)]
    else:
        by_time = sorted(order, key=lambda node: took[node])
        half = len(by_time) // 2
        groups = [[by_time[place], by_time[-1 - place]] for place in range(half)]
        groups += [[by_time[half]]] if len(by_time) % 2 else []
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2].extend(groups.pop())
    return tuple(tuple(group) for group in groups)


def summary(cell: Cell, repetitions: int) -> list[str]:
    """Return a cell's line of the table."""
    ours = [run_ours(cell, seed) for seed in range(repetitions)]
    theirs = [run_dlrover(cell, seed) for seed in range(repetitions)]
    return [
        cell.name, cell.target, *_columns(ours), _fabric_column(cell, ours),
        f"{max(run.slowest_round_s for run in ours):.2f}", *_columns(theirs), str(repetitions),
    ]  # fmt: skip


def _columns(runs: Sequence[Run]) -> list[str]:
    bad = sum(run.bad for run in runs)
    return [
        f"{sum(run.exact for run in runs) / len(runs):.3f}",
        f"{sum(run.found for run in runs) / bad:.3f}" if bad else "-",
        f"{sum(run.blamed > 0 for run in runs) / len(runs):.3f}",
        f"{sum(run.rounds for run in runs) / len(runs):.2f}",
    ]


def _fabric_column(cell: Cell, runs: Sequence[Run]) -> str:
    if not cell.leaf_size:
        return "-"
    return f"{sum(run.fabric for run in runs) / len(runs):.2f}"


HEADERS = [
    "case", "target", "exact", "recall", "blamed", "rounds", "named", "slowest round, CPU s",
    "DLRover exact", "recall", "blamed", "rounds", "runs",
]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="How often the Localizer is right.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, small cells only")
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="repetitions times this")
    parser.add_argument("--results", type=Path, help="where each line is kept")
    options = parser.parse_args()
    measured = {tuple(each["cell"]): each["line"] for each in kept(options.results)}
    lines = []
    for cell in cells():
        planned = cell.quick if options.quick else cell.repetitions
        repetitions = max(1, round(planned * options.scale)) if planned else 0
        if not repetitions or options.only not in cell.name:
            continue
        line = measured.get((cell.name, repetitions))
        if line is None:
            line = summary(cell, repetitions)
            keep(options.results, {"cell": (cell.name, repetitions), "line": line})
        lines.append(line)
        print(*line, sep="\t", flush=True)
    print(tabulate(lines, headers=HEADERS, tablefmt="github", disable_numparse=True))
    print("\nblamed: share of runs in which any healthy node was convicted; named: share in which")
    print("exactly the bad leaf or path was named; seeds 0 to runs - 1.")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have had enough
    try:
        main()
    except KeyboardInterrupt:
        print(
            "benchmarks.localize: interrupted; with --results what was measured is kept",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)
