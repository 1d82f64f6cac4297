# SPDX-License-Identifier: Apache-2.0
"""A recorded journal, replayed: four phases, two models, a round in which no node answered.

Nodes n1 to n3 are of one model, the others of another; n3 is slow by itself, n5 meets nobody, n6
calculated wrongly once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.preflight.session.session import Append, Conclude, Session
from slurm_health.records.record_codec import Entry, decode
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level
from slurm_health.system import journal

DATA = Path(__file__).parents[2] / "data" / "journal"
NODES = tuple(f"n{number}" for number in range(1, 7))


def entries() -> list[Entry]:
    return [
        decode(line)
        for writer in (*NODES, journal.MASTER)
        for line in journal.path_of(DATA, writer).read_bytes().splitlines()
    ]


def replayed(*, without: type[VerdictReached] | None = None) -> Session:
    session = Session(NODES, make_localizer, TimeLimits(), phases(["thorough"]))
    for entry in entries():
        if without is None or not isinstance(entry.record, without):
            session.state.fold(entry)
    return session


def test_a_journal_with_a_verdict_is_over_for_a_master_that_takes_over() -> None:
    assert replayed().next_step(1e9) == Conclude()


def test_the_samples_of_a_journal_lead_to_the_verdict_that_stands_in_it() -> None:
    (before,) = (entry.record for entry in entries() if isinstance(entry.record, VerdictReached))
    step = replayed(without=VerdictReached).next_step(1e9)

    assert isinstance(step, Append)
    assert isinstance(step.record, VerdictReached)
    assert found(step.record) == found(before)
    for now, then in zip(step.record.nodes, before.nodes, strict=True):
        assert (now.slowdown, now.probability) == pytest.approx(
            (then.slowdown, then.probability), abs=0.02
        )
    assert before.nodes[2].level is Level.SLOW
    assert before.nodes[4].level is Level.FAULTY


def found(verdict: VerdictReached) -> list[tuple[object, ...]]:
    """Return all but wording and numbers: of a line of evidence, which round it is about."""
    return [
        (
            node.node,
            node.level,
            node.component,
            [line.split()[:2] for line in node.evidence if not line.startswith("device ")],
        )
        for node in verdict.nodes
    ]
