# SPDX-License-Identifier: Apache-2.0
"""Verdicts of the Localizer on simulated clusters of 2 to 64 nodes, healthy and with faults."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from slurm_health.preflight.localize.localizer import Localizer, LocalizeSettings
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.nodeset import fold
from slurm_health.records.verdict import Level, Round, Verdict


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One kind of cluster; each seed is a cluster of its own."""

    nodes: int
    what: str  # is bad, as `faults_of` reads it
    where: str = ""
    seeds: int = 2
    weather: Weather = field(default_factory=Weather)
    settings: LocalizeSettings = field(default_factory=LocalizeSettings)
    leaf_size: int = 0
    leaves_known: bool = True
    devices: int = 1


def faults_of(scene: Scene, nodes: Sequence[str], rng: random.Random) -> Faults:
    """Return the faults that words such as `1 at 1.3x, noise` give to random nodes."""
    *_, last = words = scene.what.partition(", ")[0].split()
    factor = float(last[:-1]) if last.endswith("x") else 0.0
    leaves = sorted({leaf_of(node) for node in nodes})
    match words:
        case [count, "dead" | "flaky"]:
            probability = 1.0 if last == "dead" else 0.6
            return Faults(failing=dict.fromkeys(rng.sample(nodes, int(count)), probability))
        case [count, "silent"]:
            return Faults(silent=frozenset(rng.sample(nodes, int(count))))
        case [count, "at", _]:
            bad = rng.sample(nodes, len(nodes) if count == "all" else int(count))
            slow = dict.fromkeys(bad, factor)
            return Faults(compute=slow) if scene.devices > 1 else Faults(network=slow)
        case [count, "computes", "at", _]:
            return Faults(compute=dict.fromkeys(rng.sample(nodes, int(count)), factor))
        case ["1", "dead", "and", "1", "at", _]:
            dead, alive = rng.sample(nodes, 2)
            return Faults(failing={dead: 1.0}, network={alive: factor})
        case ["a", "link", "at", _]:
            return Faults(paths={frozenset(rng.sample(nodes, 2)): factor})
        case ["path", _]:
            return Faults(paths={frozenset(rng.sample(leaves, 2)): factor})
        case ["uplink", of_leaf, *node]:
            leaf = rng.choice(leaves)
            others = [node for node in nodes if leaf_of(node) != leaf]
            network = {rng.choice(others): factor} if node else {}
            return Faults(leaves={leaf: float(of_leaf[:-1])}, network=network)
    return Faults()


def leaf_of(node: str) -> str:
    """Return the leaf that is written into a node's name."""
    return node.partition("-")[0]


NOISY = Weather(noise=0.05)
ROUGH = Weather(noise=0.03, heavy_tails=True, congestion=0.1)
HICCUPS = Weather(hiccups=0.05)
SHARED = Weather(
    noise=0.1, spread=0.05, device_spread=0.05, spikes=0.05, heavy_tails=True, drift=0.1
)
BUSY = Weather(noise=0.3, spread=0.15, device_spread=0.15, spikes=0.05, heavy_tails=True, drift=0.6)
CPU = settings_from({}, kind=DeviceKind.CPU)
FINE = LocalizeSettings(network_floor=0.05, compute_floor=0.05)
# Of clusters of every size.
EVERYWHERE = (
    *("healthy", "healthy, noise", "1 dead", "1 silent", "1 at 1.2x", "1 at 2x, noise"),
    *("1 computes at 1.3x", "1 flaky"),
)


def of_nodes() -> Iterator[Scene]:
    """Yield clusters with bad nodes and links, and no fabric to speak of."""
    sizes = ((2, 2), (3, 2), (4, 3), (5, 2), (8, 2), (16, 1), (64, 1))
    for (nodes, seeds), what in product(sizes, EVERYWHERE):
        weather = NOISY if "noise" in what else Weather()
        yield Scene(what=what, nodes=nodes, seeds=seeds, weather=weather)
    yield Scene(what="2 dead", nodes=4, seeds=3)
    yield Scene(what="3 dead", nodes=4)
    yield Scene(what="3 dead", nodes=8)
    yield Scene(what="26 dead", nodes=64, seeds=1)
    yield Scene(what="2 at 1.5x", nodes=4, seeds=3)
    yield Scene(what="3 at 1.5x", nodes=4)
    yield Scene(what="all at 1.5x", nodes=4)
    yield Scene(what="3 at 1.3x", nodes=16)
    yield Scene(what="6 at 1.1x, low floors", nodes=64, seeds=1, settings=FINE)
    yield Scene(what="1 at 1.1x", nodes=8, seeds=3)
    yield Scene(what="1 computes at 1.15x", nodes=8, seeds=3)
    yield Scene(what="1 dead and 1 at 1.5x", nodes=8)
    yield Scene(what="hiccups", nodes=8, seeds=3, weather=HICCUPS)
    yield Scene(what="1 dead, hiccups", nodes=8, seeds=3, weather=HICCUPS)
    yield Scene(what="a link at 2x", nodes=4)
    yield Scene(what="a link at 2x", nodes=8)
    yield Scene(what="a link at 2x, 4 rounds", nodes=5, settings=LocalizeSettings(min_rounds=4))


def of_devices() -> Iterator[Scene]:
    """Yield clusters of nodes with eight devices, whose healthy ones differ more or less."""
    whats = ("healthy", "1 at 1.25x")
    for nodes, spread, what in product((2, 16), (0.015, 0.03, 0.08), whats):
        weather = Weather(noise=0.01, device_spread=spread)
        where = f"8 devices {spread:.1%} apart, "
        yield Scene(where=where, what=what, nodes=nodes, seeds=1, devices=8, weather=weather)


def of_fabrics() -> Iterator[Scene]:
    """Yield clusters on leaf switches, which the run knows of or not."""
    small = ("healthy", "healthy, rough", "uplink 1.3x", "uplink 1.3x and a node 1.5x", "path 1.5x")
    for (size, whats), known in product(((4, small), (8, ("uplink 1.3x",))), (True, False)):
        for what in whats:
            yield Scene(
                where=f"leaves of {size}{'' if known else ', not known'}: ",
                what=what,
                nodes=size**2,
                seeds=1,
                weather=ROUGH if "rough" in what else Weather(),
                leaf_size=size,
                leaves_known=known,
            )


def of_cpus() -> Iterator[Scene]:
    """Yield nodes without accelerators, on machines with other work."""
    bad = ("healthy", "1 dead", "1 at 10x", "1 computes at 5x")
    for (where, weather), what in product((("shared", SHARED), ("overloaded", BUSY)), bad):
        yield Scene(where=f"{where} CPUs, ", what=what, nodes=5, weather=weather, settings=CPU)


def concluded(scenes: Iterable[Scene]) -> Iterator[tuple[str, object]]:
    """Yield what is concluded about each cluster, after how many rounds."""
    for scene in scenes:
        for seed in range(scene.seeds):
            faults, verdict, rounds = _played(scene, seed)
            yield (
                f"{scene.nodes} nodes, {scene.where}{scene.what}, seed {seed}",
                {"bad": _bad(faults), **_concluded(verdict), "rounds": len(rounds)},
            )


def _played(scene: Scene, seed: int) -> tuple[Faults, Verdict, list[Round]]:
    size = scene.leaf_size or scene.nodes
    nodes = [f"leaf{number // size}-n{number}" for number in range(scene.nodes)]
    faults = faults_of(scene, nodes, random.Random(f"faults {seed}"))
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
