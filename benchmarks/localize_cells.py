# SPDX-License-Identifier: Apache-2.0
"""The clusters that localisation is measured on: each cell's size, faults and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slurm_health.preflight.localize.localizer import (
    LocalizeSettings,
)
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, Weather

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
    faint = [(8, 16, 1.12, 0.03), (16, 32, 1.15, 0.05)]
    return [
        Cell(name=f"unknown leaves ({leaves} x {size}): {name}", nodes=leaves * size,
             leaf_size=size, leaves_known=False, faults=faults, repetitions=many, quick=few,
             target=target, weather=_weather(0.02))
        for name, leaves, size, faults, many, few, target in cases
    ] + [
        Cell(name=f"unknown leaves ({leaves} x {size}): uplink {factor}x, noise {noise:.0%}",
             nodes=leaves * size, leaf_size=size, leaves_known=False, faults=slow_leaf(factor),
             repetitions=25, quick=3, target="blamed 1 %", weather=_weather(noise))
        for leaves, size, factor, noise in faint
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
             target=target, weather=weather, settings=settings_from({}, kind=DeviceKind.CPU))
        for name, weather in (("shared", _SHARED), ("overloaded", _BUSY))
        for fault, kind, target in faults
    ]  # fmt: skip


def _speed_cells() -> list[Cell]:
    return [
        Cell(name=f"speed: 1 % of {n} at 1.2x", nodes=n, faults=slow(n // 100, 1.2), repetitions=1,
             quick=0, target=target)
        for n, target in ((4096, "round <= 0.5 s"), (16384, "round <= 3 s"))
    ]  # fmt: skip
