# SPDX-License-Identifier: Apache-2.0
"""What one round of pairs that looks as it should does not exclude, and how often, by simulation.

    python -m benchmarks.one_round                    the table of docs/explanation/localisation.md
    python -m benchmarks.one_round --runs 50          sooner, less precisely
    python -m benchmarks.one_round --cpus             with the floors and the noise of CPU nodes

A fault is missed where the check ends with every node healthy and no connection mentioned.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from slurm_health.preflight.localize.localizer import Localizer, LocalizeSettings
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.verdict import Level, Verdict

NODES = (4, 6, 16)
ROUNDS = (1, 2)
HEADERS = ["nodes", "fault", "missed by one round", "by two", "runs of each"]
_ACCELERATORS = Weather()
_CPUS = Weather(noise=0.05, spread=0.02, device_spread=0.02, spikes=0.02)
# Far above the floors of either kind of device, so that the plan decides and not the noise.
_SLOW = {DeviceKind.ACCELERATOR: 1.5, DeviceKind.CPU: 4.0}


@dataclass(frozen=True, kw_only=True)
class Trap:
    """One row: what is broken, of how many nodes, for which devices."""

    nodes: int
    name: str
    faults: Faults
    device: DeviceKind


def traps(device: DeviceKind) -> Iterator[Trap]:
    """Yield the rows. The first nodes are the bad ones: who meets whom is up to the seed."""
    times = _SLOW[device]
    for count in NODES:
        names = names_of(count)
        kinds = {
            f"one node's network {times:g}x slower": Faults(network={names[0]: times}),
            f"one node computes {times:g}x slower": Faults(compute={names[0]: times}),
            f"two networks {times:g}x slower": Faults(network=dict.fromkeys(names[:2], times)),
            "one node fails every second time": Faults(failing={names[0]: 0.5}),
            f"the connection of two nodes {2 * times:g}x slower": Faults(
                paths={frozenset(names[:2]): 2 * times}
            ),
        }
        for name, faults in kinds.items():
            yield Trap(nodes=count, name=name, faults=faults, device=device)


def names_of(count: int) -> list[str]:
    """Return the names of so many nodes."""
    return [f"n{number}" for number in range(1, count + 1)]


def missed(trap: Trap, *, least_rounds: int, seed: int) -> bool:
    """Tell whether a check that need not take more than these rounds calls everything healthy."""
    names = names_of(trap.nodes)
    settings: LocalizeSettings = replace(
        settings_from({"min_rounds": least_rounds}, kind=trap.device), seed=seed
    )
    cluster = SimulatedCluster(
        names,
        faults=trap.faults,
        weather=_CPUS if trap.device is DeviceKind.CPU else _ACCELERATORS,
        seed=random.Random(f"weather {seed}").randrange(1 << 30),
    )
    verdict, _ = play(Localizer(names, settings=settings), cluster)
    return _says_nothing(verdict)


def _says_nothing(verdict: Verdict) -> bool:
    well = all(found.level is Level.HEALTHY for found in verdict.nodes.values())
    return well and not verdict.paths and not verdict.leaves


def row(trap: Trap, runs: int) -> Sequence[str]:
    """Return a row of the table."""
    shares = [
        sum(missed(trap, least_rounds=least, seed=seed) for seed in range(runs)) / runs
        for least in ROUNDS
    ]
    return [str(trap.nodes), trap.name, *(f"{share:.3f}" for share in shares), str(runs)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_round",
        description="How often one round of pairs misses a fault, by simulation.",
    )
    parser.add_argument("--runs", type=int, default=300, metavar="K", help="of each row [300]")
    parser.add_argument("--cpus", action="store_true", help="CPU nodes instead of accelerators")
    options = parser.parse_args()
    device = DeviceKind.CPU if options.cpus else DeviceKind.ACCELERATOR
    rows = []
    for trap in traps(device):
        rows.append(row(trap, options.runs))
        print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
