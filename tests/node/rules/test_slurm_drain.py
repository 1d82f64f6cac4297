# SPDX-License-Identifier: Apache-2.0
"""Slurm's own drains: every text, whose it is, and whether the node may return."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from slurm_health.node.rules.recovery import after_test
from slurm_health.node.rules.settings import Recovery
from slurm_health.node.rules.slurm_drain import (
    PASSES,
    HeldProcess,
    Resource,
    SlurmDrain,
    advice_for,
    bound,
    culprits,
    sentence,
    wave,
    why_not_lift,
)
from slurm_health.node.rules.slurm_reasons import (
    COMPLETING,
    REASONS,
    explained,
    job_in,
    kind_of,
)
from tests.support.rows import rows

SINCE = "2026-11-28T14:00:00"
NFS = Resource(name="/scratch", kind="nfs4", source="nfs1:/scratch")
PYTHON = HeldProcess(
    pid=81,
    start_ticks=7,
    name="python",
    uid=1000,
    state="D",
    wait="nfs_file_read",
    stack=("rpc_wait_bit_killable", "nfs_file_read"),
    killed=True,
    resources=(NFS,),
)
DRAIN = SlurmDrain(
    node="n7",
    reason="Kill task failed",
    retest=(),
    time_s=1000.0,
    since=SINCE,
    kind="kill-task-failed",
    state="IDLE+DRAIN",
    job=4711,
    uid=1000,
    held=(PYTHON,),
)


@rows
def test_other_texts_are_an_administrators(releases: str, reason: str, kind: str | None) -> None:
    row = kind_of(reason)
    assert (row.name if row else None) == kind, releases
    record = bound(None, reason, SINCE, 1.0, "n7")
    assert (record.job if record else None) == (job_in(reason) if kind else None)


def test_each_reason_is_explained_by_its_text_its_name_and_a_line_of_sinfo() -> None:
    for row in REASONS:
        for words in (row.texts[0], row.name, f"{row.texts[0]} [root@{SINCE}]"):
            assert explained(words) == row
    assert explained("COMPLETING") == COMPLETING
    assert explained("soft-lockup") is None
    assert job_in("Kill task failed (JobId=4711 StepId=0)") == 4711


def _other(node: str = "n8", **changes: Any) -> SlurmDrain:
    if changes.pop("nothing_held", False):
        changes["held"] = ()
    return msgspec.structs.replace(DRAIN, node=node, **changes)


@rows
def test_a_node_returns_only_if_nothing_speaks_against_it(
    changes: dict[str, Any], setting: str, others: list[dict[str, Any]], why: str
) -> None:
    drain = msgspec.structs.replace(DRAIN, **{"passes": PASSES, **changes})
    nodes = (_other(**other) for other in others)
    found = why_not_lift(drain, setting=setting or "lift", others=nodes)
    assert why in found if why else found == ""


def test_passes_are_apart_and_begin_anew_after_an_obstacle() -> None:
    settings, drain, passes = Recovery(passes=PASSES, apart_s=60), DRAIN, []
    for now_s, passed in ((1100, True), (1110, True), (1200, False), (1300, True), (1400, True)):
        drain = after_test(drain, all_passed=passed, now_s=now_s, settings=settings)
        passes.append(drain.passes)
    assert passes == [1, 1, 0, 1, 2]


@rows
def test_a_drain_is_its_text_and_its_time(
    before: dict[str, Any], reason: str, since: str, since_s: float, job: int | None, held: int
) -> None:
    record = msgspec.structs.replace(DRAIN, **before)
    found = bound(record, reason, since or SINCE, since_s, "n7")
    assert (-1 if found and found.foreign else found.job if found else None) == job
    assert len(found.held if found else ()) == held


def test_one_sentence_says_what_happened_what_was_found_and_what_returns_the_node() -> None:
    def said(name_of: Mapping[int, str], setting: str = "lift", **changes: object) -> str:
        drain = msgspec.structs.replace(DRAIN, **changes)
        return sentence(drain, setting=setting, now_s=1840.0, name_of=name_of.__getitem__)

    alice = {1000: "alice"}
    assert said(alice, stuck="python(81) waits; /scratch (nfs1:/scratch) does not answer") == (
        "drained by Slurm 14 min (Kill task failed, job 4711 of alice): python(81) waits; /scratch"
        " (nfs1:/scratch) does not answer → lifts itself when that process is gone and /scratch"
        " answers"
    )
    assert "python(81) in D state in nfs_file_read" in said(alice)
    text = said(alice, kind="completing", reason="", held=(), job=7)
    assert text.startswith("job 7 of alice ended 14 min ago and stays in COMPLETING")
    assert "resumes no node that it calls INVAL" in said(
        alice, kind="gres", state="IDLE+DRAIN+INVALID_REG"
    )
    assert "down by Slurm" in said(alice, kind="rebooted", state="DOWN", held=())
    for passes, stuck, when in ((PASSES, "", "now"), (1, "", "when"), (PASSES, "a GPU", "when")):
        assert f"may return {when}" in said(alice, "explain", passes=passes, stuck=stuck)


def test_a_wave_is_named_by_what_is_narrowest() -> None:
    others = [_other("n8", job=1, uid=5), _other("n9", job=2, uid=6)]
    found = wave(DRAIN, others)
    assert found is not None
    assert "/scratch" in found.text
    assert found.nodes == "n[7-9]"
    assert wave(DRAIN, others[:1]) is None
    assert wave(DRAIN, [*others[:1], others[0]]) is None  # one node twice


@rows
def test_who_drained_two_nodes_is_named(second: dict[str, Any], named: set[str]) -> None:
    names: Callable[[int], str] = {1000: "alice", 7: "bob"}.__getitem__
    assert set(culprits([DRAIN, _other(**second)], 2000.0, names)) == named


def test_the_advice_to_the_owner_fits_what_the_processes_wait_for() -> None:
    dump = msgspec.structs.replace(PYTHON, wait="dump_user_range", resources=())
    assert "ulimit -c 0" in advice_for([_other("n8", held=(dump,))])
    assert "/scratch" in advice_for([DRAIN])
    assert "KillWait" in advice_for([_other("n8", held=())])
