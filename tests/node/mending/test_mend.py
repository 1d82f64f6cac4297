# SPDX-License-Identifier: Apache-2.0
"""A drained node that stays faulty is mended by steps, and nothing is done to anybody else's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.node.hooks import nodes
from slurm_health.node.mending import ledger, perform
from slurm_health.node.notify import EventKind
from slurm_health.node.rules.mending import MendStep, Tried
from slurm_health.records.nodeset import expand
from slurm_health.system.slurm.client import Client
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node
from tests.support.mended_node import (
    again,
    at_look,
    begun,
    events,
    fails_at_look,
    faulty,
    mended,
    note,
    rebooted,
    steps,
    until,
)
from tests.support.notified import received


def test_nothing_is_done_unless_the_site_wants_it(node: Node, slurm: FakeScontrol) -> None:
    faulty(node)
    again(node)

    assert not (node.shared / "mending.json").exists()
    assert rebooted(slurm) == []


def test_a_dry_run_says_once_what_would_be_done_and_does_nothing(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'reboot'", first="reboot")
    node.more = node.more.replace("dry_run = false", "")
    faulty(node)

    assert "dry run: would be mended by reboot: the first step for this fault" in again(node)
    assert "would be mended" not in again(node)
    assert rebooted(slurm) == []
    controller = Client.for_hook(node.environ(), limit_s=30)
    text = nodes.text(nodes.listing(node.site, controller.nodes(), node.now_s), node.now_s)
    assert "mending: n3: reboot, 5 min ago: would be taken (dry run): /broken exists" in text


def test_a_node_that_a_step_keeps_busy_is_not_late_with_its_health_check(
    rack: list[Node],
) -> None:
    mended(rack[1], "'ticket'")
    now_s = rack[1].now_s
    for name in ("n1", "n3"):
        step = Tried(
            node=name, step=MendStep.DEEP_TEST, time_s=now_s, drain="d", until_s=now_s + 7200
        )
        ledger.keep(rack[1].site, step)
    rack[0].healthcheck()
    known = Client.for_hook(rack[1].environ(), limit_s=30).nodes()
    asked = {name: known[name] for name in ("n1", "n2", "n3")}

    busy = nodes.listing(rack[1].site, asked, now_s + 7199)
    over = nodes.listing(rack[1].site, asked, now_s + 7201)

    assert (busy.silent, busy.never_checked) == (["n2"], ["n2"])
    assert (over.silent, over.never_checked) == (["n1", "n2", "n3"], ["n2", "n3"])


def test_steps_follow_one_another_until_a_person_is_called(node: Node, slurm: FakeScontrol) -> None:
    mended(node, "'reload', 'reboot', 'ticket'")
    faulty(node)

    assert "mending: reload: the first step for this fault" in again(node)
    until(lambda: steps(node) == [("reload", "done")], "the reload")
    until(lambda: not perform.is_at_work(node.site.state), "its end")
    assert (node.directory / "reloads").read_text() == "reloaded\n"

    said = again(node)
    assert "mending: reload failed: the fault is still there: /broken exists" in said
    assert "mending: reboot: after reload" in said
    (call,) = rebooted(slurm)
    assert call.startswith("reboot reason=shealth:scratch /broken exists check=scratch")

    slurm.set({"n3": ("DOWN+DRAIN+REBOOT_ISSUED", f"{note(node)} : reboot issued [slurm@x]")})
    assert "nothing is done to mend it: it is DOWN+DRAIN+REBOOT_ISSUED" in again(node)
    slurm.set({"n3": ("IDLE+DRAIN", f"{note(node)} : reboot issued [slurm@x]")})
    assert "mending: ticket: after reload, reboot" in again(node)
    assert "it waits for a person" in again(node)

    assert steps(node) == [("reload", "failed"), ("reboot", "failed"), ("ticket", "done")]
    told = [kind for kind, _ in events(node)]
    expected = [EventKind.DRAINED, EventKind.STEP_FAILED, EventKind.STEP_FAILED, EventKind.TICKET]
    assert told == expected
    (ticket,) = [event for event in received(node) if event.kind is EventKind.TICKET]
    assert any(line.startswith("drained with: shealth:scratch") for line in ticket.evidence)
    assert any(line.startswith("reboot at 1000600: failed") for line in ticket.evidence)
    assert node.state == "IDLE+DRAIN"


def test_a_node_that_a_step_has_mended_comes_back_by_the_usual_rules(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'reboot', 'ticket'", first="reboot")
    faulty(node)
    again(node)
    slurm.set({"n3": ("IDLE+DRAIN", f"{note(node)} : reboot issued [slurm@x]")})
    node.mend()
    for _ in range(3):
        assert node.state == "IDLE+DRAIN"
        again(node, 61)

    assert node.state == "IDLE"
    assert steps(node) == [("reboot", "done")]
    assert [kind for kind, _ in events(node)] == [EventKind.DRAINED, EventKind.RELEASED]


@pytest.mark.parametrize(
    ("state", "edit"),
    [
        ("MIXED+DRAIN", ""),
        ("ALLOCATED+DRAIN", ""),
        ("IDLE+COMPLETING+DRAIN", ""),
        ("IDLE+DRAIN+RESERVED", ""),
        ("IDLE+DRAIN+MAINTENANCE", ""),
        ("DOWN+DRAIN", ""),
        ("DOWN*+DRAIN", ""),
        ("IDLE*+DRAIN", ""),
        ("IDLE+DRAIN@", ""),
        ("IDLE+DRAIN", ", keep it -- admin"),
        ("IDLE", ""),
    ],
)
def test_nothing_is_done_where_a_job_runs_or_somebody_else_is_at_it(
    node: Node, slurm: FakeScontrol, state: str, edit: str
) -> None:
    mended(node, "'reboot'", first="reboot")
    faulty(node)
    slurm.set({"n3": (state, f"{note(node)}{edit}" if state != "IDLE" else "")})
    node.more = node.more.replace("enabled = true", "enabled = true\nper_day = 9")
    for _ in range(2):
        again(node)
        slurm.set({"n3": (state, node.reason)})

    assert rebooted(slurm) == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("IDLE+DRAIN", "ticket 42: DIMM being swapped, do not touch"),
        ("DOWN", "ticket 42: PSU burnt"),
        ("IDLE", ""),
    ],
)
def test_a_node_that_an_administrator_took_while_it_was_checked_is_not_rebooted(
    node: Node, slurm: FakeScontrol, state: str, reason: str
) -> None:
    mended(node, "'reboot'", first="reboot")
    faulty(node)
    slurm.trouble(at_look(2, state, reason))

    assert "nothing is done to mend it: it is no longer drained by us alone" in again(node)
    assert rebooted(slurm) == []
    assert (node.state, note(node)) == (state, reason)
    assert steps(node) == [("reboot", "failed")]
    assert [kind for kind, _ in events(node)] == [EventKind.DRAINED]


def test_a_node_that_slurm_cannot_show_right_before_is_not_rebooted(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'reboot'", first="reboot")
    faulty(node)
    slurm.trouble(fails_at_look(2))

    assert "mending: reboot failed: it could not be begun" in again(node)
    assert rebooted(slurm) == []


def test_a_check_that_could_not_be_measured_mends_nothing(node: Node, slurm: FakeScontrol) -> None:
    mended(node, "'reboot'", first="reboot")
    faulty(node)
    node.more += "[checks.scratch2]\ncheck='memory'\n"
    node.more = node.more.replace("[mend]", "[hooks2]\n[mend]").replace("[hooks2]\n", "")
    node.flag.unlink()
    (node.machine / "proc/meminfo").unlink()
    again(node)

    assert rebooted(slurm) == []


def test_while_the_breaker_has_tripped_nothing_is_done(rack: list[Node]) -> None:
    for each in rack[:5]:
        mended(each, "'reboot'", first="reboot")
        each.break_it()
        each.healthcheck()

    assert "nothing is done to mend it: the breaker of gpu has tripped" in again(rack[0])
    assert rebooted(rack[0].slurm) == []


def test_all_nodes_together_take_so_many_steps_in_an_hour(rack: list[Node]) -> None:
    for each in rack[:3]:
        mended(each, "'reboot'", "per_hour = 2", first="reboot")
        faulty(each)
        again(each)

    assert len(rebooted(rack[0].slurm)) == 2
    assert "2 steps within the hour, the limit for all nodes" in rack[2].said


@pytest.mark.parametrize("state", ["DOWN*+DRAIN+REBOOT_ISSUED", "IDLE"])
def test_a_node_that_is_not_back_is_told_by_another(
    rack: list[Node], slurm: FakeScontrol, state: str
) -> None:
    for each in rack[:2]:
        mended(each, "'reboot'", first="reboot")
    faulty(rack[0])
    again(rack[0])
    slurm.set({"n1": (state, "")})
    rack[1].now_s = rack[0].now_s + 1801
    rack[1].healthcheck()

    is_back = state == "IDLE"  # a person has been quicker than the limit
    assert steps(rack[1]) == [("reboot", "done" if is_back else "failed")]
    kinds = [] if is_back else [EventKind.STEP_FAILED, EventKind.TICKET]
    assert events(rack[1]) == [(kind, "n1 is not back from its reboot") for kind in kinds]


def test_a_node_that_slurm_does_not_know_any_more_is_told_once(
    rack: list[Node], slurm: FakeScontrol
) -> None:
    mended(rack[1], "'ticket'")
    gone = msgspec.structs.replace(begun(MendStep.REBOOT), node="cloud7", until_s=rack[1].now_s)
    ledger.keep(rack[1].site, gone)
    again(rack[1])
    asked = len(slurm.calls())
    again(rack[1])

    text = "cloud7 is not back from its reboot"
    assert events(rack[1]) == [(EventKind.STEP_FAILED, text), (EventKind.TICKET, text)]
    assert len(slurm.calls()) == asked


def test_while_a_step_is_taken_nothing_is_checked(node: Node) -> None:
    mended(node, "'reload'")
    faulty(node)
    with perform.at_work(node.site.state):
        assert "a step to mend it is under way: nothing is checked" in again(node)
    assert "under way" not in again(node).partition("mending: reload")[0]


def test_a_slurm_that_refuses_to_reboot_is_a_failed_step(node: Node, slurm: FakeScontrol) -> None:
    mended(node, "'reboot', 'ticket'", first="reboot")
    faulty(node)
    slurm.trouble('case "$1" in reboot) echo Access denied >&2; exit 1;; esac')
    said = again(node)

    assert "mending: reboot failed: it could not be begun" in said
    assert "Access denied" in said
    assert "mending: ticket: after reboot" in again(node)


@pytest.mark.parametrize("text", ["", "{", "[3]"])
def test_with_a_garbled_list_of_steps_nothing_is_done(
    node: Node, slurm: FakeScontrol, shared: Path, text: str
) -> None:
    mended(node, "'reboot'", first="reboot")
    faulty(node)
    (shared / "mending.json").write_text(text)

    assert "mending.json cannot be read" in again(node)
    assert rebooted(slurm) == []


def test_names_of_nodes_in_the_list_are_those_of_slurm(node: Node) -> None:
    mended(node, "'ticket'", first="ticket")
    faulty(node)
    again(node)

    assert {each.node for each in ledger.look(node.site)} <= set(expand("n[1-20]"))
