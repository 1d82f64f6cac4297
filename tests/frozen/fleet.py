# SPDX-License-Identifier: Apache-2.0
"""Standings of nodes by what their jobs found, and whom a sweep checks next."""

import random
from collections.abc import Iterator
from itertools import product

from slurm_health.fleet import partners
from slurm_health.fleet.standing import NodeRecord, SpoiledJob, standings

_HOUR_S = 3600.0


def entries() -> Iterator[tuple[str, object]]:
    """Yield all of it."""
    yield from _standings()
    yield from _choices()


def _spoiled(count: int, hours: float, users: int) -> tuple[SpoiledJob, ...]:
    apart_s = hours * _HOUR_S / max(1, count - 1)
    return tuple(
        SpoiledJob(
            job=str(each), time_s=each * apart_s, uid=1000 + each % users, signals=("faulty",)
        )
        for each in range(count)
    )


def _standings() -> Iterator[tuple[str, object]]:
    for jobs, spoiled, hours, users, fleet in product(
        (3, 9, 10, 20, 100), (0, 1, 2, 3, 4, 6), (6.0, 13.0, 23.9, 24.1, 200.0), (1, 2), (4, 100)
    ):
        if spoiled > jobs or (spoiled == 0 and (hours != 6.0 or users != 1)):
            continue
        node = NodeRecord(node="n0", jobs=jobs, users=2, spoiled=_spoiled(spoiled, hours, users))
        others = [
            NodeRecord(node=f"n{each}", jobs=50, users=3, spoiled=_spoiled(each % 2, 1.0, 1))
            for each in range(1, fleet)
        ]
        found = standings([node, *others])
        (own,) = (each for each in found if each.node == "n0")
        yield (
            f"{spoiled} of {jobs} jobs within {hours:g} h, {users} users, {fleet} nodes",
            [own.level.value, own.score, float(f"{own.chance:.2g}")],
        )


def _choices() -> Iterator[tuple[str, object]]:
    for nodes, share in product((2, 3, 4, 10, 64), (0.01, 0.1, 0.5, 1.0)):
        yield f"sweep: of {nodes} nodes, share {share:g}", partners.at_once(nodes, share)
    for seed, size, room, share_due in product(range(3), (3, 4, 8), (3, 7, 12), (0.3, 1.0)):
        rng = random.Random(seed)
        idle = {f"n{each}": float(rng.choice((0, 100, 200, 300, 400))) for each in range(12)}
        checks = [rng.sample(sorted(idle), 4) for _ in range(8)]
        due = {node for node in idle if rng.random() < share_due}
        met = partners.meetings(checks, idle)
        groups = partners.groups(idle, met, due=due, size=size, room=room)
        key = f"sweep: seed {seed}, groups of {size}, room for {room}, due {share_due:g}"
        yield key, [" ".join(group) for group in groups]
