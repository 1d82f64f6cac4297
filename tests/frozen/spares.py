# SPDX-License-Identifier: Apache-2.0
"""How many spares a job should ask for, by what was counted on its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from slurm_health.preflight.decide.spares import spares_for
from slurm_health.records.standings import Counted, Rates


def of(events: int, exposure: float, nodes: int, *, clump: float = 1.0) -> Counted:
    """Return what was counted."""
    return Counted(events=events, exposure=exposure, nodes=nodes, clump=clump)


# By name: bad nodes per start, failures per hour of a script on a node, lemons among all nodes.
RATES = {
    "nothing known": None,
    "few starts": (of(3, 99, 3), of(0, 999, 0), 0.0),
    "enough starts": (of(3, 100, 3), of(0, 999, 0), 0.0),
    "enough hours": (of(3, 100, 3), of(1, 1000, 1), 0.0),
    "a good cluster": (of(2, 8000, 2), of(3, 60000, 3), 0.0),
    "a bad one": (of(80, 2000, 40), of(50, 9000, 30), 0.0),
    "clumps": (of(80, 2000, 4, clump=20), of(50, 9000, 5, clump=9), 0.0),
    "lemons": (of(2, 8000, 2), of(3, 60000, 3), 1.7),
}


def entries() -> Iterator[tuple[str, object]]:
    """Yield how many spares, what the ends of the intervals come to, and what was not known."""
    for (name, known), nodes, hours, risk in product(
        RATES.items(), (1, 2, 8, 64, 512), (None, 24.0, 336.0), (0.05, 0.01)
    ):
        rates = None
        if known:
            starts, ran, lemons = known
            rates = Rates(days=28, nodes=100, starts=starts, hours=ran, lemons=lemons)
        found = spares_for(rates, nodes, hours=hours, risk=risk)
        span = "at its start" if hours is None else f"for {hours:g} h"
        yield (
            f"{name}: {nodes} nodes {span}, risk {risk:g}",
            [
                found.count,
                found.fewest,
                found.most,
                float(f"{found.expected:.3g}"),
                *found.recorded,
            ],
        )
