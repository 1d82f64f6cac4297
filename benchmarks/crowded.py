# SPDX-License-Identifier: Apache-2.0
"""How often nodes are judged rightly while others use their processors.

    python -m benchmarks.crowded             the whole table
    python -m benchmarks.crowded --runs 10   fewer repetitions

Each row has nodes without accelerators, of which others take a share of the processors' time,
now more and now less. The times and what is read of others' time go the way of a check: samples,
results of groups, rounds, a verdict. *Without* leaves out what was read. The same seeds give the
same table.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tabulate import tabulate

from slurm_health.preflight.localize import Localizer
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather
from slurm_health.preflight.session.conclusion import with_others
from slurm_health.preflight.session.measurement import group_result, served
from slurm_health.records.records import NodeReported, Sampled
from slurm_health.records.verdict import GroupResult, Level, Outcome, Round, Verdict

_WEATHER = Weather(noise=0.05, spread=0.03, device_spread=0.03, spikes=0.02)
_WINDOWS, _EXCHANGES = 5, 10
_WINDOW_NOISE = 0.02
# Of four nodes that twelve processes crowded (CROWDED_MS in tests/preflight/session), the shares of
# one node's windows lie within 0.1, and what was read of them is right to a twentieth.
_STEADINESS = 12.0  # of the shares: the two parameters of a beta distribution together
_MISREAD = 0.05
# Of an exchange only what its own threads wait for is read, and neither the kernel's, nor that who
# is woken waits for a slice (3 ms, a usual one of Linux's schedulers).
_SEEN_OF_EXCHANGE, _SLICE_MS = 0.7, 3.0


# The first node is crowded in the rows where half of the nodes are or one is; the second is not.
_CROWDS = {
    "nobody": (0.0, 0.0, 0.0),
    "one, 80 %": (0.8, 0.0, 0.0),
    "half of them, 50 %": (0.5, 0.0, 0.5),
    "half of them, 80 %": (0.8, 0.0, 0.8),
    "all, 50 %": (0.5, 0.5, 0.5),
    "all, 80 %": (0.8, 0.8, 0.8),
    "all 40 %, one 80 %": (0.8, 0.4, 0.4),
}
_FAULTS = {
    "none": Faults(),
    "crowded one computes 3x slower": Faults(compute={"n1": 3.0}),
    "other one computes 3x slower": Faults(compute={"n2": 3.0}),
    "network of other one 3x slower": Faults(network={"n2": 3.0}),
    "network of other one 10x slower": Faults(network={"n2": 10.0}),
}


@dataclass
class Tally:
    """What became of the nodes in all runs with one fault, or with any."""

    runs: int = 0
    accused_runs: int = 0  # in which a healthy node is convicted
    well: int = 0
    in_doubt: int = 0
    bad: int = 0
    found: int = 0


class CrowdedCluster:
    """Answers rounds as a quiet cluster does, whose nodes others crowd."""

    def __init__(
        self, taken: Mapping[str, float], faults: Faults, seed: int, *, read: bool
    ) -> None:
        self._quiet = SimulatedCluster(list(taken), faults=faults, weather=_WEATHER, seed=seed)
        self._taken = taken
        self._read = read
        self._rng = random.Random(f"crowd {seed}")
        self.shares: dict[str, list[float]] = {}

    def answer(self, round_: Round) -> list[GroupResult]:
        """Return what the groups report."""
        return [self._result(quiet, round_.index) for quiet in self._quiet.answer(round_)]

    def served(self) -> dict[str, float]:
        """Return the share of the time that each node had its processors for."""
        return {node: median(shares) for node, shares in self.shares.items()}

    def _result(self, quiet: GroupResult, index: int) -> GroupResult:
        samples = [
            self._solo(node, ms, quiet.nodes, index)
            for times in quiet.node_ms.values()
            for node, ms in times.items()
        ]
        for sample in samples:
            self.shares.setdefault(sample.node, []).append(served(sample) or 1.0)
        for ms in quiet.shared_ms.values():
            samples += self._exchange(ms, quiet.nodes, index)
        ended = {
            node: NodeReported(node=node, round=index, outcome=Outcome.MEASURED)
            for node in quiet.nodes
        }
        return group_result(quiet.nodes, samples, ended)

    def _solo(self, node: str, own_ms: float, group: Sequence[str], index: int) -> Sampled:
        times = []
        for _ in range(_WINDOWS):
            ms = own_ms * self._rng.gauss(1.0, _WINDOW_NOISE)
            times.append((ms / (1 - self._share(node)), ms))
        return self._sample(node, group, index, "matmul", times, seen=1.0)

    def _exchange(self, quiet_ms: float, group: Sequence[str], index: int) -> list[Sampled]:
        times: dict[str, list[tuple[float, float]]] = {node: [] for node in group}
        for _ in range(_EXCHANGES):
            own_ms = quiet_ms * self._rng.gauss(1.0, _WINDOW_NOISE)
            shares = {node: self._share(node) for node in group}
            slices = sum(share / (1 - share) for share in shares.values())
            waited_ms = self._rng.expovariate(1.0) * _SLICE_MS * slices
            whole_ms = own_ms / (1 - max(shares.values())) + waited_ms
            for node, share in shares.items():
                times[node].append((whole_ms, whole_ms * (1 - share)))
        return [
            self._sample(node, group, index, "allgather", each, seen=_SEEN_OF_EXCHANGE)
            for node, each in times.items()
        ]

    def _share(self, node: str) -> float:
        mean = self._taken[node]
        if not mean:
            return 0.0
        return min(0.98, self._rng.betavariate(mean * _STEADINESS, (1 - mean) * _STEADINESS))

    def _sample(
        self, node: str, group: Sequence[str], index: int, probe: str,
        times: Sequence[tuple[float, float]], *, seen: float,
    ) -> Sampled:  # fmt: skip
        taken_ms = [
            min(whole, max(0.0, (whole - own) * seen * self._rng.gauss(1.0, _MISREAD)))
            for whole, own in times
        ]
        told = self._read and any(taken_ms)
        return Sampled(
            node=node, round=index, group=list(group), probe=probe,
            scope="solo" if probe == "matmul" else "pair",
            iteration_ms=[[whole for whole, _ in times]], taken_ms=[taken_ms] if told else [],
        )  # fmt: skip


def taken_of(count: int, crowd: tuple[float, float, float]) -> dict[str, float]:
    """Return the share of each node's processors that others take: of n1, n2, and n3 and so on.

    Where n2 is left alone, so is every second node.
    """
    first, second, others = crowd
    return {
        f"n{number}": first if number == 1 else others if number % 2 else second
        for number in range(1, count + 1)
    }


def tally(taken: Mapping[str, float], faults: Faults, runs: int, *, read: bool) -> Tally:
    """Play so many runs, with or without what is read of others' time."""
    found = Tally()
    for seed in range(runs):
        verdict = _verdict(taken, faults, seed, read=read)
        bad = faults.nodes
        accused = {*verdict.named(Level.FAULTY), *verdict.named(Level.SLOW)}
        found.runs += 1
        found.accused_runs += bool(accused - bad)
        found.well += len(taken) - len(bad)
        found.in_doubt += len(set(verdict.named(Level.INCONCLUSIVE)) - bad)
        found.bad += len(bad)
        found.found += len(accused & bad)
    return found


def _verdict(taken: Mapping[str, float], faults: Faults, seed: int, *, read: bool) -> Verdict:
    cluster = CrowdedCluster(taken, faults, seed, read=read)
    settings = replace(settings_from({}, kind=DeviceKind.CPU), seed=seed)
    localizer = Localizer(list(taken), settings=settings)
    while (round_ := localizer.next_round()) is not None:
        localizer.observe(round_.index, cluster.answer(round_))
    verdict = localizer.verdict()
    return with_others(verdict, cluster.served()) if read else verdict


def row(count: int, crowd: str, runs: int) -> list[str]:
    """Return a line of the table: each figure with what is read, and in brackets without."""
    taken = taken_of(count, _CROWDS[crowd])
    tallies = [
        [tally(taken, faults, runs, read=read) for read in (True, False)]
        for faults in _FAULTS.values()
    ]
    accused = [
        sum(each[way].accused_runs for each in tallies) / sum(each[way].runs for each in tallies)
        for way in (0, 1)
    ]
    well = tallies[0]
    return [
        str(count), crowd, _both(accused),
        _both([each.in_doubt / each.well for each in well]),
        *(_both([each.found / each.bad for each in pair]) for pair in tallies[1:]),
    ]  # fmt: skip


def _both(figures: Sequence[float]) -> str:
    ours, without = figures
    return f"{ours:.2f} ({without:.2f})"


HEADERS = ["nodes", "crowded", "runs that accuse a healthy node", "healthy nodes in doubt",
           *list(_FAULTS)[1:]]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="How rightly crowded nodes are judged.")
    parser.add_argument("--runs", type=int, default=100, help="repetitions of each fault")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16], help="of each row")
    options = parser.parse_args()
    lines = []
    for count in options.nodes:
        for crowd in _CROWDS:
            lines.append(row(count, crowd, options.runs))
            print(*lines[-1], sep="\t", flush=True)
    print(tabulate(lines, headers=HEADERS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
