# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.node.rules.accusations import Accusation, from_journal
from slurm_health.records.probe_catalog import BUILT_IN, Metric
from slurm_health.records.record_codec import encode
from slurm_health.records.records import Record, RunStarted, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict


def journal(component: str) -> bytes:
    started = RunStarted(
        run_id="r",
        job_id=12,
        attempt=0,
        cluster="lab",
        partition="main",
        nodes=["n1", "n2"],
        master_node="n1",
        user="alice",
    )
    judged = NodeVerdict(node="n2", level=Level.FAULTY, component=component, reason="x")
    records: list[Record] = [started, VerdictReached(nodes=[judged])]
    return b"".join(
        encode(record, entry_id=f"master:{index}", time_s=1.0)
        for index, record in enumerate(records)
    )


@pytest.mark.parametrize(
    ("component", "kind"),
    [
        ("network", "network"),
        ("compute device 3", "compute"),
        ("network rail 5", "network"),
        ("; rm -rf /", "node"),
        ("", "node"),
    ],
)
def test_a_test_of_a_part_is_chosen_by_what_kind_of_part_it_is(component: str, kind: str) -> None:
    found = from_journal(journal(component), node="n2", job=12)

    assert found is not None
    assert found.component == kind


@pytest.mark.parametrize(
    "component", sorted({Metric(probe=probe.name).component for probe in BUILT_IN})
)
def test_what_a_probe_blames_is_a_kind_of_its_own(component: str) -> None:
    found = from_journal(journal(component), node="n2", job=12)

    assert found is not None
    assert found.component == component


@pytest.mark.parametrize(
    ("evidence", "probability", "strong"),
    [
        (("round 1", "round 2"), 0.99, True),
        (("round 1",), 1.0, False),
        (("round 1", "round 1"), 1.0, False),  # the same test, said twice
        (("round 1", "round 2"), 0.98, False),
    ],
)
def test_an_accusation_that_stands_alone_brings_two_tests(
    evidence: tuple[str, ...], probability: float, strong: bool
) -> None:
    accused = Accusation(
        node="n1",
        job=12,
        component="network",
        reason="x",
        probability=probability,
        evidence=evidence,
    )

    assert accused.strong is strong
