# SPDX-License-Identifier: Apache-2.0
"""The prolog: a proven fault drains and requeues; nothing else keeps a job from starting."""

import os
import shutil
import time

import pytest

from slurm_health.node import shared
from slurm_health.node.rules import drain_note
from tests.lab import cgroups
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.rows import rows


def test_on_a_well_node_the_job_starts_and_slurm_is_not_asked(node: Node) -> None:
    assert not node.prolog()
    assert node.slurm.calls() == []
    assert node.said == ""


def test_a_fault_drains_with_our_note_and_keeps_the_job_away(node: Node) -> None:
    node.break_it()
    assert node.prolog(job=7)
    assert node.state == "IDLE+DRAIN"
    note = drain_note.parse(node.reason)
    assert note is not None
    assert (note.checks, note.job, note.time_s) == (("scratch",), 7, int(node.now_s))
    assert note.text == "/broken exists"
    # Slurm writes `Prolog error` only where there is no note yet.
    assert [call.split()[0] for call in node.slurm.calls()] == [*["show"] * 3, "update", "show"]


@rows
def test_a_lowered_or_shadowed_fault_drains_no_node(node: Node, setting: str, said: str) -> None:
    node.more = f"[checks.low]\ncheck='memory'\nmin_total_gib=9999\n{setting}\n"
    assert not node.prolog()
    assert f"check=low {said}" in node.said
    assert node.slurm.calls() == []


@pytest.mark.parametrize("is_fault", [False, True])
def test_a_hung_check_drains_only_if_a_hang_is_a_fault(node: Node, is_fault: bool) -> None:
    check = "check='command'\nargv=['sleep', '3600']\ntime_limit_s=0.5\n"
    node.more = f"[checks.hung]\n{check}hang_is_fault={str(is_fault).lower()}\n"
    began = time.monotonic()
    assert node.prolog() is is_fault
    assert time.monotonic() - began < 60
    assert ("did not end within 0.5 s" in node.reason) is is_fault
    assert is_fault or "check=hung inconclusive: did not end within 0.5 s" in node.said
    assert node.said.startswith("slurm-health: prolog: node=n3 job=7 ")
    assert is_fault or node.slurm.calls() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root takes processor time away")
def test_a_check_that_had_no_processor_has_not_hung(node: Node) -> None:
    controller, name = cgroups.find_cpu_controller(), f"starved{os.getpid()}"
    if controller is None:
        pytest.skip("no cpu controller that can be used")
    try:
        cgroups.create(controller, name, ("n3",))
        cgroups.set_quota(controller, name, "n3", 0.05)
        mine = cgroups.node_cgroup(controller, name, "n3") / "cgroup.procs"
        work = f"echo $$ >{mine}; while :; do :; done"
        check = f"check='command'\nargv=['sh', '-c', '{work}']\ntime_limit_s=2\n"
        node.more = f"[checks.starved]\n{check}hang_is_fault=true\n"
        assert not node.prolog()
        said = "check=starved inconclusive: did not end within 2 s: it was ready to run, and did"
        assert said in node.said
        assert node.slurm.calls() == []
        cgroups.set_quota(controller, name, "n3", None)
        while mine.read_text():  # what was killed ends
            time.sleep(0.01)
    finally:
        cgroups.remove(controller, name)


def test_a_hung_check_among_those_that_share_a_child_is_named(node: Node) -> None:
    path = node.machine / "proc/loadavg"
    path.unlink()
    os.mkfifo(path)  # opening it for reading waits for a writer that never comes
    node.more = "[checks.load]\ntime_limit_s=1\n"
    began = time.monotonic()
    assert not node.prolog()
    assert time.monotonic() - began < 60
    assert node.said.count("inconclusive") == 1
    assert "check=load inconclusive: did not end within 1 s" in node.said


# --- who else has a say --------------------------------------------------


@rows
def test_only_a_node_in_the_pool_without_a_note_is_drained(
    node: Node, slurm: HookedSlurm, state: str, note: str, keeps_job_away: bool, after: str
) -> None:
    slurm.set({"n3": (state, note)})
    node.break_it()
    assert node.prolog() is keeps_job_away
    assert node.state == after
    is_drained = after == "IDLE+DRAIN"
    assert any(call.startswith("update") for call in slurm.calls()) is is_drained
    assert is_drained or node.reason == note
    leaves_pool = keeps_job_away and "DRAIN" not in state  # Slurm drains where a prolog fails
    assert bool(shared.read_ledger(node.site.breaker).entries) is leaves_pool


# --- Slurm in trouble --------------------------------------------------


@rows
def test_a_controller_in_trouble_drains_nobody(
    node: Node, slurm: HookedSlurm, trouble: str
) -> None:
    node.break_it()
    slurm.trouble(trouble)
    node.hurry()
    began = time.monotonic()
    assert not node.prolog()
    assert time.monotonic() - began < 60
    assert "not_drained" in node.said
    assert node.state == "IDLE"
    assert shared.read_ledger(node.site.breaker).entries == ()


# --- the breaker --------------------------------------------------


def test_a_job_that_breaks_nodes_costs_two_and_no_more(rack: list[Node]) -> None:
    for each in rack[:3]:
        each.break_it()
    assert [each.prolog(job=7, uid=5) for each in rack[:3]] == [True, True, False]
    assert "job 7 has cost 2 nodes already" in rack[2].said
    assert shared.read_ledger(rack[0].site.breaker).trips == {}


@pytest.mark.parametrize(("uid", "name"), [(0, "root"), (4_000_000_000, "4000000000")])
def test_a_user_whose_jobs_break_nodes_is_capped(rack: list[Node], uid: int, name: str) -> None:
    for each in rack:
        each.break_it()
    answers = [each.prolog(job=100 + number, uid=uid) for number, each in enumerate(rack[:5])]
    assert answers == [True, True, True, True, False]
    assert f"jobs of user {name} have cost 4 nodes" in rack[4].said


@pytest.mark.heavy
@pytest.mark.parametrize("trouble", ["untrusted", "gone", "garbled"])
def test_a_ledger_that_cannot_be_used_drains_nobody(node: Node, trouble: str) -> None:
    node.break_it()
    if trouble == "gone":
        shutil.rmtree(node.shared)
    elif trouble == "untrusted":
        node.shared.chmod(0o777)
    else:
        (node.shared / "ledger.99").write_text("{")
    node.hurry()
    assert not node.prolog()
    assert node.state == "IDLE"
    assert "not_drained: could not use the breaker's ledger" in node.said


def test_a_lock_that_another_holds_for_ever_delays_a_drain_and_stops_none(node: Node) -> None:
    from filelock import FileLock

    node.break_it()
    node.hurry()
    with FileLock(node.shared / "lock"):
        assert node.prolog()
    assert [entry.node for entry in shared.read_ledger(node.site.breaker).entries] == ["n3"]


def test_without_a_shared_directory_nobody_is_drained(node: Node) -> None:
    from tests.support.sites import load_site

    node.break_it()
    state = f"[hooks]\nstate = '{node.directory}/state'\n"
    site = load_site(node.directory / "etc", f"{state}[checks.f]\ncheck='file'\npath='/x'\n")
    from slurm_health.node.hooks import prolog

    assert not prolog.run(node.hook("prolog", node.environ(7), site))
    assert node.slurm.calls() == []
