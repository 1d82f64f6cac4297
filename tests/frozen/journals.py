# SPDX-License-Identifier: Apache-2.0
"""The verdict of a check whose journal is replayed: without the one that stands in it."""

from collections.abc import Iterator
from pathlib import Path

from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.record_codec import decode
from slurm_health.records.records import VerdictReached
from slurm_health.system import journal

DATA = Path(__file__).parents[1] / "data" / "journal"
NODES = tuple(f"n{number}" for number in range(1, 7))


def entries() -> Iterator[tuple[str, object]]:
    """Yield the level and the component of each node, the level of each link."""
    controller = Controller(NODES, make_localizer, TimeLimits(), phases(["thorough"]))
    for writer in (*NODES, journal.MASTER):
        for line in journal.path_of(DATA, writer).read_bytes().splitlines():
            entry = decode(line)
            if not isinstance(entry.record, VerdictReached):
                controller.state.fold(entry)
    step = controller.next_step(1e9)
    verdict = step[0] if isinstance(step, tuple) else None
    if not isinstance(verdict, VerdictReached):
        raise TypeError(f"the replayed journal leads to no verdict but to {step}")
    for node in verdict.nodes:
        yield f"thorough, four phases: {node.node}", [node.level.value, node.component]
    for link in (*verdict.paths, *verdict.leaves):
        yield f"thorough, four phases: {'-'.join(link.ends)}", link.level.value
