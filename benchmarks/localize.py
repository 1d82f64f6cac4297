# SPDX-License-Identifier: Apache-2.0
"""How often the Localizer is right on simulated clusters, compared with DLRover's rule.

    python -m benchmarks.localize            the whole table
    python -m benchmarks.localize --quick    fewer repetitions, no cell above 512 nodes
    python -m benchmarks.localize --only leaf

Every cell is repeated with seeds 0, 1, 2, ..., so every run prints the same table. DLRover's rule
is implemented from its published description: two rounds, first neighbours, then the fastest with
the slowest; a node that failed in both is faulty, and one that took more than twice the median is a
straggler. To its advantage, it gets the network time alone, without the matrix product it adds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tabulate import tabulate

from slurm_health.preflight.localize.localizer import (
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
    Round,
    Verdict,
)
from slurm_health.preflight.localize.settings import Device, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather
from slurm_health.records.nodeset import fold

_FAILED_S = 3600.0  # what DLRover takes as the time of a failed check
_STRAGGLER_FACTOR = 2.0

FaultsOf = Callable[[Sequence[str], random.Random], Faults]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of the table."""

    name: str
    nodes: int
    faults: FaultsOf
    repetitions: int
    quick: int
    target: str
    weather: Weather = field(default_factory=Weather)
    settings: LocalizeSettings = field(default_factory=LocalizeSettings)
    leaf_size: int = 0
    leaves_known: bool = True
    devices: int = 1


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


def nobody(_nodes: Sequence[str], _rng: random.Random) -> Faults:
    """Leave everything well."""
    return Faults()


def failing(count: int, probability: float = 1.0) -> FaultsOf:
    """Let `count` random nodes fail with this probability."""
    return lambda nodes, rng: Faults(failing=dict.fromkeys(rng.sample(nodes, count), probability))


def slow(count: int, factor: float) -> FaultsOf:
    """Let the network of `count` random nodes be slower by this factor."""
    return lambda nodes, rng: Faults(network=dict.fromkeys(rng.sample(nodes, count), factor))


def slow_compute(count: int, factor: float) -> FaultsOf:
    """Let `count` random nodes compute slower by this factor."""
    return lambda nodes, rng: Faults(compute=dict.fromkeys(rng.sample(nodes, count), factor))


def slow_leaf(factor: float, node_factor: float = 1.0) -> FaultsOf:
    """Let the uplink of one random leaf be slower, and perhaps one node elsewhere."""

    def faults(nodes: Sequence[str], rng: random.Random) -> Faults:
        leaves = sorted({leaf_of(node) for node in nodes})
        bad = rng.choice(leaves)
        others = [node for node in nodes if leaf_of(node) != bad]
        network = {rng.choice(others): node_factor} if node_factor > 1 else {}
        return Faults(leaves={bad: factor}, network=network)

    return faults


def slow_path(factor: float) -> FaultsOf:
    """Let the connection between two random leaves be slower."""

    def faults(nodes: Sequence[str], rng: random.Random) -> Faults:
        ends = rng.sample(sorted({leaf_of(node) for node in nodes}), 2)
        return Faults(paths={frozenset(ends): factor})

    return faults


def leaf_of(node: str) -> str:
    """Return the leaf that is written into a node's name."""
    return node.split("-")[0]


def names_of(cell: Cell) -> list[str]:
    """Return the node names of a cell, with the leaf in them."""
    size = cell.leaf_size or cell.nodes
    return [f"leaf{number // size}-n{number}" for number in range(cell.nodes)]


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


def _weather(noise: float, **more: object) -> Weather:
    return replace(Weather(), noise=noise, **more)  # type: ignore[arg-type]


_FINE = LocalizeSettings(network_floor=0.05, compute_floor=0.05)  # as a site would, for 10 %
_ROUGH = _weather(0.03, heavy_tails=True, congestion=0.1)


# CPU nodes on a machine with other work: single tests scatter, and whole rounds are slow.
_SHARED = Weather(
    noise=0.1, spread=0.05, device_spread=0.05, spikes=0.05, heavy_tails=True, drift=0.1
)
_BUSY = Weather(
    noise=0.3, spread=0.15, device_spread=0.15, spikes=0.05, heavy_tails=True, drift=0.6
)


def cells() -> list[Cell]:
    """Return the table."""
    return [
        *_dead_cells(),
        *_slow_cells(),
        *_healthy_cells(),
        *_spread_cells(),
        *_fabric_cells(),
        *_unknown_fabric_cells(),
        *_cpu_cells(),
        *_speed_cells(),
    ]


def _dead_cells() -> list[Cell]:
    hard = [
        ("2 of 4", 4, 2, 400, 60, "exact .99"),
        ("3 of 8", 8, 3, 200, 30, "exact .99"),
        ("40 % of 64", 64, 26, 60, 10, "exact 1.00"),
        ("40 % of 4096", 4096, 1638, 3, 0, "exact 1.00"),
        ("1 of 4", 4, 1, 200, 30, "rounds <= 3"),
        ("1 of 8", 8, 1, 100, 20, "rounds <= 3"),
        ("2 of 8", 8, 2, 200, 30, "rounds <= 3"),
        ("25 % of 64", 64, 16, 60, 10, "rounds <= 3"),
        ("25 % of 512", 512, 128, 10, 2, "rounds <= 3"),
        ("25 % of 4096", 4096, 1024, 3, 0, "rounds <= 3"),
    ]
    table = [
        Cell(name=f"dead: {name}", nodes=n, faults=failing(bad), repetitions=many, quick=few,
             target=target, weather=_weather(0.02))
        for name, n, bad, many, few, target in hard
    ]  # fmt: skip
    table.append(Cell(
        name="flaky .9: 5 % of 512, hiccups .2 %", nodes=512, faults=failing(26, 0.9),
        repetitions=40, quick=4, target="recall .98, blamed 1 %",
        weather=_weather(0.02, hiccups=0.002),
    ))  # fmt: skip
    return table


# What one test can hardly show: the same cells for the network and for the devices.
_FAINT = [
    ("10 % of 64 at 1.1x, noise 2 %", 64, 6, 1.1, 0.02, _FINE, 100, 8, "recall .97"),
    ("1 % of 4096 at 1.1x, noise 2 %", 4096, 41, 1.1, 0.02, _FINE, 6, 0, "recall .97, rounds <= 8"),
    ("5 % of 512 at 1.2x, noise 5 %", 512, 26, 1.2, 0.05, None, 20, 3, "recall .97"),
]


def _slow_cells() -> list[Cell]:
    slows = [
        ("1 of 4 at 1.2x, noise 2 %", 4, 1, 1.2, 0.02, None, 400, 60, "recall .98"),
        ("1 of 8 at 1.2x, noise 2 %", 8, 1, 1.2, 0.02, None, 200, 30, "recall .99"),
        ("2 of 4 at 1.5x, noise 2 %", 4, 2, 1.5, 0.02, None, 100, 20, ""),
        *_FAINT,
        ("40 % of 64 at 1.5x, noise 5 %", 64, 26, 1.5, 0.05, None, 40, 6, ""),
        ("40 % of 512 at 1.5x, noise 5 %", 512, 205, 1.5, 0.05, None, 10, 2, ""),
    ]
    table = [
        Cell(name=f"slow: {name}", nodes=n, faults=slow(bad, factor), repetitions=many, quick=few,
             target=target, weather=_weather(noise), settings=settings or LocalizeSettings())
        for name, n, bad, factor, noise, settings, many, few, target in slows
    ]  # fmt: skip
    table += [
        Cell(name=f"compute: 1 of {n} at 1.2x, noise 2 %", nodes=n, faults=slow_compute(1, 1.2),
             repetitions=many, quick=few, target="", weather=_weather(0.02))
        for n, many, few in ((8, 100, 20), (64, 40, 6))
    ]  # fmt: skip
    table += [
        Cell(name=f"compute: {name}", nodes=n, faults=slow_compute(bad, factor), repetitions=many,
             quick=few, target=target, weather=_weather(noise),
             settings=settings or LocalizeSettings())
        for name, n, bad, factor, noise, settings, many, few, target in _FAINT
    ]  # fmt: skip
    # One round that looks as it should ends a check: two of four are seen by more, where asked for.
    (two,) = (cell for cell in table if "2 of 4" in cell.name)
    asked = LocalizeSettings(min_rounds=2)
    table.append(replace(two, name=f"{two.name}, 2 rounds asked for", settings=asked))
    return table


def _healthy_cells() -> list[Cell]:
    healthy = [(4, 1000, 100), (8, 600, 60), (64, 200, 20), (512, 30, 4), (4096, 6, 0)]
    return [
        Cell(name=f"healthy: {n}, noise {noise:.0%}", nodes=n, faults=nobody, repetitions=many,
             quick=few, target="blamed 1 %", weather=_weather(noise))
        for noise in (0.02, 0.05) for n, many, few in healthy
    ]  # fmt: skip


def _spread_cells() -> list[Cell]:
    """Return cells in which the devices of healthy nodes differ for good."""
    faults = [("healthy", nobody, "blamed 1 %"), ("1 at 1.25x", slow_compute(1, 1.25), "exact .99")]
    # Among devices further apart than that a quarter is within what healthy ones differ by.
    told_apart = 0.03
    return [
        Cell(name=f"devices {spread:.1%} apart, {n} x 8: {name}", nodes=n, devices=8, faults=kind,
             repetitions=many, quick=few, target=target,
             weather=_weather(0.01, device_spread=spread))
        for n, many, few in ((2, 200, 20), (16, 100, 8), (64, 40, 3))
        for spread in (0.015, 0.025, 0.03, 0.05, 0.08) for name, kind, target in faults
        if spread <= told_apart or kind is nobody
    ]  # fmt: skip


def _unknown_fabric_cells() -> list[Cell]:
    """Return cells whose nodes hang on leaves that no topology names."""
    cases = [
        ("uplink 1.3x", 8, 8, slow_leaf(1.3), 100, 6, "blamed 1 %"),
        ("uplink 1.3x and a node 1.5x", 8, 8, slow_leaf(1.3, 1.5), 100, 4, "blamed 1 %"),
        ("6 nodes 1.3x", 8, 8, slow(6, 1.3), 100, 4, "exact .98"),
        ("uplink 1.3x", 4, 4, slow_leaf(1.3), 200, 10, ""),
    ]
    return [
        Cell(name=f"unknown leaves ({leaves} x {size}): {name}", nodes=leaves * size,
             leaf_size=size, leaves_known=False, faults=faults, repetitions=many, quick=few,
             target=target, weather=_weather(0.02))
        for name, leaves, size, faults, many, few, target in cases
    ]  # fmt: skip


def _fabric_cells() -> list[Cell]:
    fabric = [
        ("uplink 1.3x", slow_leaf(1.3), _weather(0.02), "blamed 0, named .95"),
        ("uplink 1.3x, rough", slow_leaf(1.3), _ROUGH, "blamed 0, named .95"),
        ("uplink 1.3x and a node 1.5x", slow_leaf(1.3, 1.5), _weather(0.05), "blamed 0, named .95"),
        ("path 1.5x", slow_path(1.5), _weather(0.02), ""),
        ("nothing", nobody, _weather(0.05), "blamed 0"),
        ("nothing, rough", nobody, _ROUGH, "blamed 0"),
    ]
    table = [
        Cell(name=f"leaf (8 x 8): {name}", nodes=64, leaf_size=8, faults=faults, repetitions=100,
             quick=10, target=target, weather=weather)
        for name, faults, weather, target in fabric
    ]  # fmt: skip
    (path,) = (cell for cell in table if "path" in cell.name)
    patient = LocalizeSettings(min_rounds=6)
    table.append(replace(path, name=f"{path.name}, 6 rounds", settings=patient))
    return table


def _cpu_cells() -> list[Cell]:
    faults = [
        ("healthy", nobody, "blamed 1 %, rounds <= 3"),
        ("1 dead", failing(1), "exact .99"),
        ("1 with a network 10x slower", slow(1, 10.0), "recall .95"),
        ("1 computes 5x slower", slow_compute(1, 5.0), "recall .95"),
    ]
    return [
        Cell(name=f"CPUs, {name}: {fault} of 5", nodes=5, faults=kind, repetitions=200, quick=20,
             target=target, weather=weather, settings=settings_from({}, kind=Device.CPU))
        for name, weather in (("shared", _SHARED), ("overloaded", _BUSY))
        for fault, kind, target in faults
    ]  # fmt: skip


def _speed_cells() -> list[Cell]:
    return [
        Cell(name=f"speed: 1 % of {n} at 1.2x", nodes=n, faults=slow(n // 100, 1.2), repetitions=1,
             quick=0, target=target)
        for n, target in ((4096, "round <= 0.5 s"), (16384, "round <= 3 s"))
    ]  # fmt: skip


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
    options = parser.parse_args()
    lines = []
    for cell in cells():
        planned = cell.quick if options.quick else cell.repetitions
        repetitions = max(1, round(planned * options.scale)) if planned else 0
        if repetitions and options.only in cell.name:
            lines.append(summary(cell, repetitions))
            print(*lines[-1], sep="\t", flush=True)
    print(tabulate(lines, headers=HEADERS, tablefmt="github", disable_numparse=True))
    print("\nblamed: share of runs in which any healthy node was convicted; named: share in which")
    print("exactly the bad leaf or path was named; seeds 0 to runs - 1.")


if __name__ == "__main__":
    main()
