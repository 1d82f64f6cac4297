# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import Action, ActionDone, ActionIntended, Record
from slurm_health.report.model import Act, Progress, acts_of


def intended(action: str, *nodes: str) -> ActionIntended:
    return ActionIntended(action=Action(action), nodes=list(nodes))


def done(action: str, *nodes: str, succeeded: bool = True, detail: str = "") -> ActionDone:
    return ActionDone(action=Action(action), succeeded=succeeded, nodes=list(nodes), detail=detail)


def summary(acts: tuple[Act, ...]) -> list[tuple[str, str, str]]:
    return [(act.action, ",".join(act.nodes), act.progress.value) for act in acts]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [intended("drain", "n3"), done("drain", "n3")], [("drain", "n3", "done")], id="done"
        ),
        pytest.param([intended("drain", "n3")], [("drain", "n3", "intended")], id="no end"),
        pytest.param(
            [intended("drain", "n3"), done("drain", succeeded=False)],
            [("drain", "n3", "failed")],
            id="failed without naming the nodes",
        ),
        pytest.param(
            [intended("drain", "n3", "n5"), done("drain", "n3")],
            [("drain", "n3", "done"), ("drain", "n5", "failed")],
            id="took effect on some",
        ),
        pytest.param(
            [intended("drain", "n3", "n5"), done("drain", "n3", succeeded=False)],
            [("drain", "n3", "done"), ("drain", "n5", "failed")],
            id="failed for all but one",
        ),
        pytest.param(
            [intended("drain", "n3"), done("drain", "n3", succeeded=False, detail="refused")],
            [("drain", "n3", "failed")],
            id="failed, naming the nodes it was meant for",
        ),
        pytest.param(
            [done("drain", "n3", succeeded=False, detail="left alone")],
            [("drain", "n3", "failed")],
            id="never tried",
        ),
        pytest.param(
            [intended("drain", "n3"), done("drain")],
            [("drain", "n3", "failed")],
            id="took effect on none",
        ),
        pytest.param(
            [
                intended("drain", "n3", "n5"),
                done("drain", "n3"),
                done("drain", "n5", succeeded=False, detail="no such node"),
            ],
            [("drain", "n3", "done"), ("drain", "n5", "failed")],
            id="one result per node",
        ),
        pytest.param(
            [intended("drain", "n3"), intended("drain", "n5"), done("drain", "n3")],
            [("drain", "n3", "done"), ("drain", "n5", "intended")],
            id="two intents",
        ),
        pytest.param(
            [
                intended("requeue"),
                done("requeue", succeeded=False),
                intended("requeue"),
                done("requeue"),
            ],
            [("requeue", "", "failed"), ("requeue", "", "done")],
            id="a second try",
        ),
        pytest.param(
            [intended("requeue"), intended("requeue"), done("requeue")],
            [("requeue", "", "done")],
            id="intended again by a master that took over",
        ),
        pytest.param([done("requeue")], [("requeue", "", "done")], id="a result alone"),
    ],
)
def test_intents_and_results_become_acts(
    records: list[Record], expected: list[tuple[str, str, str]]
) -> None:
    entries = [
        Entry(id=f"master:{index}", time_s=0.0, kind="", record=record)
        for index, record in enumerate(records)
    ]

    assert summary(acts_of(entries)) == expected


def test_an_act_that_failed_keeps_its_cause() -> None:
    records = [intended("drain", "n3", "n5"), done("drain", "n3", detail="n5: drained by admin")]
    entries = [Entry(id="m", time_s=0.0, kind="", record=record) for record in records]

    failed = [act for act in acts_of(entries) if act.progress is Progress.FAILED]

    assert [(act.nodes, act.detail) for act in failed] == [(("n5",), "n5: drained by admin")]
