# SPDX-License-Identifier: Apache-2.0
"""Verdicts of the Localizer on simulated clusters of 2 to 64 nodes, healthy and with faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slurm_health.preflight.localize.localizer import Localizer, LocalizeSettings
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.nodeset import fold
from slurm_health.records.verdict import Level, Round, Verdict

FaultsOf = Callable[[Sequence[str], random.Random], Faults]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One kind of cluster; each seed is a cluster of its own."""

    name: str
    nodes: int
    faults: FaultsOf
    seeds: int = 2
    weather: Weather = field(default_factory=Weather)
    settings: LocalizeSettings = field(default_factory=LocalizeSettings)
    leaf_size: int = 0
    leaves_known: bool = True
    devices: int = 1


def nobody(_nodes: Sequence[str], _rng: random.Random) -> Faults:
    """Leave everything well."""
    return Faults()


def failing(count: int, probability: float = 1.0) -> FaultsOf:
    """Let random nodes fail."""
    return lambda nodes, rng: Faults(failing=dict.fromkeys(rng.sample(nodes, count), probability))


def silent(count: int) -> FaultsOf:
    """Let random nodes not answer at all."""
    return lambda nodes, rng: Faults(silent=frozenset(rng.sample(nodes, count)))


def slow(count: int, factor: float) -> FaultsOf:
    """Let the network of random nodes be slow."""
    return lambda nodes, rng: Faults(network=dict.fromkeys(rng.sample(nodes, count), factor))


def slow_compute(count: int, factor: float) -> FaultsOf:
    """Let a device of random nodes be slow."""
    return lambda nodes, rng: Faults(compute=dict.fromkeys(rng.sample(nodes, count), factor))


def dead_and_slow(factor: float) -> FaultsOf:
    """Let one node fail, another be slow."""

    def faults(nodes: Sequence[str], rng: random.Random) -> Faults:
        dead, slow_node = rng.sample(nodes, 2)
        return Faults(failing={dead: 1.0}, network={slow_node: factor})

    return faults


def slow_link(factor: float) -> FaultsOf:
    """Let the path between two random nodes be slow."""
    return lambda nodes, rng: Faults(paths={frozenset(rng.sample(nodes, 2)): factor})


def slow_leaf(factor: float, node_factor: float = 1.0) -> FaultsOf:
    """Let the uplink of a random leaf be slow, and perhaps a node below another one."""

    def faults(nodes: Sequence[str], rng: random.Random) -> Faults:
        bad = rng.choice(sorted({leaf_of(node) for node in nodes}))
        others = [node for node in nodes if leaf_of(node) != bad]
        network = {rng.choice(others): node_factor} if node_factor > 1 else {}
        return Faults(leaves={bad: factor}, network=network)

    return faults


def slow_path(factor: float) -> FaultsOf:
    """Let the connection between two random leaves be slow."""

    def faults(nodes: Sequence[str], rng: random.Random) -> Faults:
        ends = rng.sample(sorted({leaf_of(node) for node in nodes}), 2)
        return Faults(paths={frozenset(ends): factor})

    return faults


def leaf_of(node: str) -> str:
    """Return the leaf that is written into a node's name."""
    return node.partition("-")[0]


NOISY = replace(Weather(), noise=0.05)
ROUGH = replace(Weather(), noise=0.03, heavy_tails=True, congestion=0.1)
SHARED = Weather(
    noise=0.1, spread=0.05, device_spread=0.05, spikes=0.05, heavy_tails=True, drift=0.1
)
BUSY = Weather(noise=0.3, spread=0.15, device_spread=0.15, spikes=0.05, heavy_tails=True, drift=0.6)
CPU = settings_from({}, kind=DeviceKind.CPU)
FINE = LocalizeSettings(network_floor=0.05, compute_floor=0.05)


def of_nodes() -> Iterator[Scene]:
    """Yield clusters with bad nodes and links, and no fabric to speak of."""
    for nodes, seeds in ((2, 2), (3, 2), (4, 3), (5, 2), (8, 2), (16, 1), (64, 1)):
        yield Scene(name="healthy", nodes=nodes, faults=nobody, seeds=seeds)
        yield Scene(name="healthy, noise", nodes=nodes, faults=nobody, seeds=seeds, weather=NOISY)
        for name, faults in (
            ("1 dead", failing(1)),
            ("1 silent", silent(1)),
            ("1 at 1.2x", slow(1, 1.2)),
            ("1 at 2x, noise", slow(1, 2.0)),
            ("1 computes at 1.3x", slow_compute(1, 1.3)),
            ("1 flaky", failing(1, 0.6)),
        ):
            weather = NOISY if "noise" in name else Weather()
            yield Scene(name=name, nodes=nodes, faults=faults, seeds=seeds, weather=weather)
    hiccups = replace(Weather(), hiccups=0.05)
    yield Scene(name="2 dead", nodes=4, faults=failing(2), seeds=3)
    yield Scene(name="3 dead", nodes=4, faults=failing(3))
    yield Scene(name="3 dead", nodes=8, faults=failing(3))
    yield Scene(name="26 dead", nodes=64, faults=failing(26), seeds=1)
    yield Scene(name="2 at 1.5x", nodes=4, faults=slow(2, 1.5), seeds=3)
    yield Scene(name="3 at 1.5x", nodes=4, faults=slow(3, 1.5))
    yield Scene(name="all at 1.5x", nodes=4, faults=slow(4, 1.5))
    yield Scene(name="3 at 1.3x", nodes=16, faults=slow(3, 1.3))
    yield Scene(name="6 at 1.1x, low floors", nodes=64, faults=slow(6, 1.1), seeds=1, settings=FINE)
    yield Scene(name="1 at 1.1x", nodes=8, faults=slow(1, 1.1), seeds=3)
    yield Scene(name="1 computes at 1.15x", nodes=8, faults=slow_compute(1, 1.15), seeds=3)
    yield Scene(name="1 dead and 1 at 1.5x", nodes=8, faults=dead_and_slow(1.5))
    yield Scene(name="hiccups", nodes=8, faults=nobody, seeds=3, weather=hiccups)
    yield Scene(name="1 dead, hiccups", nodes=8, faults=failing(1), seeds=3, weather=hiccups)
    yield Scene(name="a link at 2x", nodes=4, faults=slow_link(2.0))
    yield Scene(name="a link at 2x", nodes=8, faults=slow_link(2.0))
    patient = LocalizeSettings(min_rounds=4)
    yield Scene(name="a link at 2x, 4 rounds", nodes=5, faults=slow_link(2.0), settings=patient)


def of_devices() -> Iterator[Scene]:
    """Yield clusters of nodes with eight devices, whose healthy ones differ more or less."""
    for nodes, seeds in ((2, 1), (16, 1)):
        for spread in (0.015, 0.03, 0.08):
            for name, faults in (("healthy", nobody), ("1 at 1.25x", slow_compute(1, 1.25))):
                yield Scene(
                    name=f"8 devices {spread:.1%} apart, {name}",
                    nodes=nodes,
                    faults=faults,
                    seeds=seeds,
                    devices=8,
                    weather=replace(Weather(), noise=0.01, device_spread=spread),
                )


def of_fabrics() -> Iterator[Scene]:
    """Yield clusters on leaf switches, which the run knows of or not."""
    cases: list[tuple[str, FaultsOf, Weather]] = [
        ("healthy", nobody, Weather()),
        ("healthy, rough", nobody, ROUGH),
        ("uplink 1.3x", slow_leaf(1.3), Weather()),
        ("uplink 1.3x and a node 1.5x", slow_leaf(1.3, 1.5), Weather()),
        ("path 1.5x", slow_path(1.5), Weather()),
    ]
    for known in (True, False):
        for name, faults, weather in cases:
            yield Scene(
                name=f"leaves of 4{'' if known else ', not known'}: {name}",
                nodes=16,
                faults=faults,
                seeds=1,
                weather=weather,
                leaf_size=4,
                leaves_known=known,
            )
    for known in (True, False):
        yield Scene(
            name=f"leaves of 8{'' if known else ', not known'}: uplink 1.3x",
            nodes=64,
            faults=slow_leaf(1.3),
            seeds=1,
            leaf_size=8,
            leaves_known=known,
        )


def of_cpus() -> Iterator[Scene]:
    """Yield nodes without accelerators, on machines with other work."""
    for where, weather in (("shared", SHARED), ("overloaded", BUSY)):
        for name, faults in (
            ("healthy", nobody),
            ("1 dead", failing(1)),
            ("1 at 10x", slow(1, 10.0)),
            ("1 computes at 5x", slow_compute(1, 5.0)),
        ):
            yield Scene(
                name=f"{where} CPUs, {name}",
                nodes=5,
                faults=faults,
                seeds=2,
                weather=weather,
                settings=CPU,
            )


def concluded(scenes: Iterable[Scene]) -> Iterator[tuple[str, object]]:
    """Yield what is concluded about each cluster, after how many rounds."""
    for scene in scenes:
        for seed in range(scene.seeds):
            faults, verdict, rounds = _played(scene, seed)
            yield (
                f"{scene.nodes} nodes, {scene.name}, seed {seed}",
                {"bad": _bad(faults), **_concluded(verdict), "rounds": len(rounds)},
            )


def _played(scene: Scene, seed: int) -> tuple[Faults, Verdict, list[Round]]:
    size = scene.leaf_size or scene.nodes
    nodes = [f"leaf{number // size}-n{number}" for number in range(scene.nodes)]
    faults = scene.faults(nodes, random.Random(f"faults {seed}"))
    topology: dict[str, list[str]] = {}
    for node in nodes:
        topology.setdefault(leaf_of(node), []).append(node)
    leaves = topology if scene.leaf_size else None
    cluster = SimulatedCluster(
        nodes,
        faults=faults,
        weather=scene.weather,
        topology=leaves,
        devices=scene.devices,
        seed=seed,
    )
    settings = replace(scene.settings, seed=seed)
    known = leaves if scene.leaves_known else None
    verdict, rounds = play(Localizer(nodes, topology=known, settings=settings), cluster)
    return faults, verdict, rounds


def _bad(faults: Faults) -> str:
    links = ["-".join(sorted(ends)) for ends in faults.paths]
    return " ".join(sorted({*faults.nodes, *faults.leaves, *links}))


def _concluded(verdict: Verdict) -> dict[str, object]:
    """Return nodes by level and component; healthy ones are left out."""
    nodes: dict[str, list[str]] = {}
    for node in verdict.nodes.values():
        if node.level is not Level.HEALTHY:
            nodes.setdefault(f"{node.level.value} {node.component}", []).append(node.node)
    named: dict[str, object] = {what: fold(names) for what, names in sorted(nodes.items())}
    for what, links in (("path", verdict.paths), ("leaf", verdict.leaves)):
        for link in links:
            named[f"{link.level.value} {what} {'-'.join(sorted(link.ends))}"] = True
    return named
