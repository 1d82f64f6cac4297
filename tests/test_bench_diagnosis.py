# SPDX-License-Identifier: Apache-2.0
"""The fault-injection benchmark plans the same run of a seed again, and judges by the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import keep
from benchmarks.diagnosis.__main__ import as_object, judged_before
from benchmarks.diagnosis.causes import BY_NAME, CAUSES, Cause, Ends
from benchmarks.diagnosis.judge import Judged, judge, with_ended_start
from benchmarks.diagnosis.plan import RANKS, Plan, plan_of, plans
from benchmarks.diagnosis.table import table

BEGAN_S = 1000.0


def plan(name: str) -> Plan:
    return Plan(cause=BY_NAME[name], seed=1, step=12, rank=1, workers=0)


def run(**given: Any) -> dict[str, Any]:
    """A check of a report, with what is given beside it."""
    empty: dict[str, Any] = {
        "hangs": [],
        "stragglers": [],
        "slowdowns": [],
        "post_mortem": None,
        "timeline": [],
    }
    return {"started_s": BEGAN_S, "nodes": [], **empty, **given}


def event(
    what: str, after_s: float, detail: str = "", nodes: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {"event": what, "after_s": after_s, "detail": detail, "nodes": list(nodes)}


def diagnosed(cause: str, *nodes: str, accused: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"cause": cause, "nodes": list(nodes), "accused": list(accused)}


def hung(cause: str, *nodes: str, **rest: Any) -> dict[str, Any]:
    return run(
        hangs=[{"found": diagnosed(cause, *nodes, **rest)}], timeline=[event("hang_found", 60.0)]
    )


def slow(node: str, cause: str) -> dict[str, Any]:
    return {"node": node, "found": diagnosed(cause, node)}


def judged(
    name: str, *runs: dict[str, Any], again_s: float | None = None, **drained: str
) -> Judged:
    report = {"runs": list(runs)}
    fault_s = BEGAN_S + 30.0
    return judge(plan(name), report, drained=drained, fault_s=fault_s, again_s=again_s)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_a_seed_is_the_same_run_again_on_a_rank_that_there_is(cause: Cause) -> None:
    planned = [plan_of(cause, seed) for seed in range(50)]

    assert planned == [plan_of(cause, seed) for seed in range(50)]
    ranks = {each.rank for each in planned}
    assert ranks == set(range(1 if cause.spares_first_node else 0, RANKS))
    assert len({each.step for each in planned}) > 10


def test_each_cause_comes_once_before_any_comes_again() -> None:
    planned = list(plans(CAUSES, 2, seed=7))

    assert [each.cause for each in planned] == [*CAUSES, *CAUSES]
    assert {each.seed for each in planned} == {7, 8}


def test_a_run_that_was_kept_is_the_same_once_it_is_read(tmp_path: Path) -> None:
    results = tmp_path / "kept" / "runs.jsonl"
    found = judge(
        plan_of(BY_NAME["stopped"], 3), {"runs": [run()]}, drained={}, fault_s=0.0, again_s=None
    )
    assert judged_before(results, 0) == []

    keep(results, {**as_object(found), "gpus": 0})

    assert judged_before(results, 0) == [found]
    assert judged_before(results, 1) == []


def test_the_right_cause_on_the_right_node_is_right() -> None:
    found = judged("stopped", hung("rank-stopped", "n2"))

    assert found.right
    assert (found.named, found.found_s) == ("rank-stopped", 30.0)


def test_another_cause_or_another_node_is_wrong() -> None:
    assert judged("stopped", hung("network-of-group", "n2")).wrong == ("named network-of-group",)
    assert judged("stopped", hung("rank-stopped", "n1")).wrong == ("shown on n1, it was n2",)
    assert judged("stopped", run()).wrong == ("named nothing",)


def test_a_slow_rank_is_right_if_why_it_is_slow_is() -> None:
    told = {"timeline": [event("straggler_found", 60.0)]}

    assert judged("loader", run(stragglers=[slow("n2", "slow-data-loader")], **told)).right
    wrong = judged("loader", run(stragglers=[slow("n2", "no-processor")], **told))
    assert wrong.wrong == ("named no-processor",)


def test_a_healthy_node_that_anything_holds_at_fault_is_accused() -> None:
    by_hang = judged("drop", hung("network-of-group", "n2", accused=("n2", "n3")))
    by_verdict = judged("killed", run(nodes=[{"node": "n2", "level": "faulty"}]))
    by_plan = judged("killed", run(timeline=[event("failure_planned", 1.0, "leave", ("n1",))]))
    by_drain = judged("stopped", hung("rank-stopped", "n2"), n2="slurm-health: …")
    by_name = judged("healthy", run(stragglers=[slow("n3", "slower-rank")]))

    accused = [each.accused for each in (by_hang, by_verdict, by_plan, by_drain, by_name)]
    assert accused == [("n3",), ("n2",), ("n1",), ("n2",), ("n3",)]


def test_what_is_the_users_must_be_planned_to_stop() -> None:
    found = {"post_mortem": diagnosed("wrong-shape", "n2")}
    told = event("diagnosed", 31.0)
    stops = run(**found, timeline=[told, event("failure_planned", 32.0, "stop: a user error")])
    goes_on = run(**found, timeline=[told, event("failure_planned", 32.0, "check: who knows")])

    assert judged("shape", stops).right
    assert judged("shape", goes_on).wrong == ("it was not planned to stop: check: who knows",)
    assert "started again" in judged("shape", stops, again_s=BEGAN_S + 50).wrong[0]


def test_what_is_not_the_users_must_go_on() -> None:
    killed = run(post_mortem=diagnosed("killed", "n2"), timeline=[event("diagnosed", 31.0)])

    assert judged("killed", killed).wrong == ("the training did not go on",)
    gone_on = judged("killed", killed, again_s=BEGAN_S + 50)
    assert (gone_on.right, gone_on.found_s, gone_on.again_s) == (True, 1.0, 20.0)


def test_why_a_start_failed_counts_once_the_script_has_been_started_again() -> None:
    went_on = {"runs": [run(timeline=[event("diagnosed", 31.0)]), run()]}
    told = with_ended_start(went_on, [diagnosed("node-lost", "n2", accused=("n2",))])

    found = judge(plan("lost"), told, drained={}, fault_s=BEGAN_S + 30, again_s=BEGAN_S + 50)
    assert (found.wrong, found.named, found.found_s) == ((), "node-lost", 1.0)
    assert with_ended_start(went_on, []) == went_on


def test_nothing_is_right_where_nothing_is_wrong() -> None:
    assert judged("healthy", run()).right
    assert not judged("healthy", hung("no-progress")).right


def test_the_table_counts_what_was_named_and_lists_what_was_wrong() -> None:
    runs = [
        judged("stopped", hung("rank-stopped", "n2")),
        judged("stopped", hung("node-silent", "n3", accused=("n3",))),
    ]
    text = table(runs)

    assert "rank-stopped 1, node-silent 1" in text
    assert "stopped, seed 1: rank 1 at step 12: named node-silent; n3 is healthy" in text
    assert "2 runs; cause and node right in 1 (50%); a healthy node accused in 1" in text
    assert not any(cause.title in text for cause in CAUSES if cause.name != "stopped")


def test_every_kind_of_end_has_a_cause_that_comes_to_it() -> None:
    assert {cause.ends for cause in CAUSES} == set(Ends)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_a_fault_in_a_real_training_is_injected_and_named() -> None:
    words = ["--only=shape", "--runs=1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.diagnosis", *words],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["runs"]
    assert (row["named"], row["node_right"], row["accused"]) == ("wrong-shape", True, [])
