# SPDX-License-Identifier: Apache-2.0
"""A drained node is repaired by steps and tested in place; nothing is done to anybody else's."""

from pathlib import Path

import msgspec
import pytest

from slurm_health.node import repair
from slurm_health.node.hooks import nodes
from slurm_health.node.notify import EventKind
from slurm_health.node.rules.repair import Outcome, RepairAttempt, RepairStep
from slurm_health.system.nvml import GpuDevice, Gpus
from slurm_health.system.slurm.client import Client
from tests.node.hooks.repaired_node import (
    again,
    at_look,
    events,
    fails_at_look,
    faulty,
    note,
    rebooted,
    repaired,
    steps,
    until,
)
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.notified import received
from tests.support.rows import rows


def begun(step: RepairStep = RepairStep.RESET, node: str = "n3") -> RepairAttempt:
    return RepairAttempt(node=node, step=step, time_s=1.0, drain="d", until_s=1801.0)


def test_a_dry_run_says_once_what_would_be_done(node: Node, slurm: HookedSlurm) -> None:
    repaired(node, "'reboot'")
    node.more = node.more.replace("dry_run = false", "")
    faulty(node)

    assert "dry run: reboot would be next: the first step for this fault" in again(node)
    assert "would be next" not in again(node)
    assert rebooted(slurm) == []
    controller = Client.for_hook(node.environ(), limit_s=30)
    text = nodes.text(nodes.listing(node.site, controller.nodes(), node.now_s), node.now_s)
    assert "repair: n3: reboot, 5 min ago: would be taken (dry run): /broken exists" in text


def test_a_node_that_a_step_keeps_busy_is_not_late(rack: list[Node]) -> None:
    repaired(rack[1], "'administrator'")
    now_s = rack[1].now_s
    for name in ("n1", "n3"):
        step = msgspec.structs.replace(
            begun(RepairStep.TEST, name), time_s=now_s, until_s=now_s + 7200
        )
        repair.save_attempt(rack[1].site, step)
    rack[0].healthcheck()
    known = Client.for_hook(rack[1].environ(), limit_s=30).nodes()
    asked = {name: known[name] for name in ("n1", "n2", "n3")}

    busy = nodes.listing(rack[1].site, asked, now_s + 7199)
    over = nodes.listing(rack[1].site, asked, now_s + 7201)

    assert (busy.silent, busy.overdue) == (["n2"], [])
    assert (over.silent, over.overdue) == (["n1", "n2", "n3"], ["n1", "n3"])
    assert "repair: n1: test, 2 h ago: not over in time" in nodes.text(over, now_s + 7201)
    assert over.needs_administrator


def test_steps_follow_until_an_administrator_is_called(node: Node, slurm: HookedSlurm) -> None:
    trace = node.directory / "resets"
    reset = f"reset = ['sh', '-c', 'echo reset >>{trace}; exit 1']"
    repaired(node, "'reset', 'reboot', 'administrator'", reset, first="reset")
    faulty(node)

    assert "repair: reset: the first step for this fault" in again(node)
    until(lambda: steps(node) == [("reset", "failed")], "the reset")
    until(lambda: not repair.is_at_work(node.site.state), "its end")

    assert "repair: reboot: after reset" in again(node)
    (call,) = rebooted(slurm)
    assert call.startswith("reboot reason=shealth: /broken exists check=scratch")

    slurm.set({"n3": ("DOWN+DRAIN+REBOOT_ISSUED", f"{note(node)} : reboot issued [slurm@x]")})
    assert "not repaired: it is DOWN+DRAIN+REBOOT_ISSUED" in again(node)
    slurm.set({"n3": ("IDLE+DRAIN", f"{note(node)} : reboot issued [slurm@x]")})
    said = again(node)
    assert "repair: reboot failed: the fault is still there: /broken exists" in said
    assert "repair: administrator: after reset, reboot" in said
    assert "it waits for an administrator" in again(node)

    assert steps(node) == [("reset", "failed"), ("reboot", "failed"), ("administrator", "done")]
    kinds = [kind for kind, _ in events(node)]
    assert kinds == [EventKind.DRAINED, EventKind.STEP_FAILED, EventKind.ADMINISTRATOR]
    (call_out,) = [event for event in received(node) if event.kind is EventKind.ADMINISTRATOR]
    assert any(line.startswith("drained with: shealth: ") for line in call_out.evidence)
    assert any(line.startswith("reboot at 1000600: failed") for line in call_out.evidence)
    assert node.state == "IDLE+DRAIN"


def test_a_repaired_node_returns_by_the_usual_rules(node: Node, slurm: HookedSlurm) -> None:
    repaired(node, "'reboot', 'administrator'")
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


@pytest.mark.heavy
@rows
def test_nothing_is_done_if_a_job_runs_or_somebody_else_is_at_it(
    node: Node, slurm: HookedSlurm, state: str, edit: str
) -> None:
    repaired(node, "'reboot'")
    faulty(node)
    slurm.set({"n3": (state, f"{note(node)}{edit}" if state != "IDLE" else "")})
    for _ in range(2):
        again(node)
        slurm.set({"n3": (state, node.reason)})

    assert rebooted(slurm) == []


@rows
def test_a_node_that_an_administrator_took_while_it_was_checked_is_not_rebooted(
    node: Node, slurm: HookedSlurm, state: str, reason: str
) -> None:
    repaired(node, "'reboot'")
    faulty(node)
    slurm.trouble(at_look(2, state, reason))

    assert "not repaired: it is no longer drained by us alone" in again(node)
    assert rebooted(slurm) == []
    assert (node.state, note(node)) == (state, reason)
    assert steps(node) == [("reboot", "failed")]
    assert [kind for kind, _ in events(node)] == [EventKind.DRAINED]


@pytest.mark.parametrize("why", ["not wanted", "not shown", "not measured", "", "{", "[3]"])
def test_nothing_is_done_unless_wanted_shown_measured_and_with_a_sound_ledger(
    node: Node, slurm: HookedSlurm, shared: Path, why: str
) -> None:
    said = "ledger.99 is damaged"
    repaired(node, "'reboot'")
    if why == "not wanted":
        node.more, said = "", "already out of the pool"
    faulty(node)
    if why == "not shown":  # right before
        slurm.trouble(fails_at_look(2))
        said = "repair: reboot failed: it could not be begun"
    elif why == "not measured":
        node.more, said = f"{node.more}[checks.scratch2]\ncheck='memory'\n", "could not be measured"
        node.flag.unlink()
        (node.machine / "proc/meminfo").unlink()
    elif why != "not wanted":
        (shared / "ledger.99").write_text(why)

    assert said in again(node)
    assert rebooted(slurm) == []
    assert why != "not wanted" or steps(node) == []


def test_while_the_breaker_has_tripped_nothing_is_done(rack: list[Node]) -> None:
    for each in rack[:5]:
        repaired(each, "'reboot'")
        each.break_it()
        each.healthcheck()

    assert "not repaired: the breaker of gpu has tripped" in again(rack[0])
    assert rebooted(rack[0].slurm) == []


# --- the site's test, in place -------------------------------------------------------------------


def awaits_its_test(node: Node, command: str) -> None:
    """Break and repair a node whose site tests it before it returns, and let its checks pass."""
    repaired(node, "", f"test = ['sh', '-c', '{command}']")
    faulty(node)
    node.mend()
    for _ in range(3):
        again(node, 61)


def ended(node: Node) -> None:
    until(lambda: steps(node)[-1][1] != "begun", "the test")
    until(lambda: not repair.is_at_work(node.site.state), "its end")


def test_a_node_returns_only_after_it_has_passed_the_sites_test_in_place(node: Node) -> None:
    awaits_its_test(node, f"until test -e {node.directory}/go; do sleep 0.05; done")

    assert "its checks pass: the test of [repair] begins" in node.said
    assert node.state == "IDLE+DRAIN"
    until(lambda: repair.is_at_work(node.site.state), "the test")
    assert "a step to repair it is under way" in again(node)
    (node.directory / "go").touch()
    ended(node)
    assert "released after 3 passes of scratch" in again(node, 61)
    assert node.state == "IDLE"


def test_a_node_that_fails_its_test_calls_an_administrator_once(node: Node) -> None:
    awaits_its_test(node, "echo bandwidth 3 GB/s, limit 20; exit 4")
    ended(node)
    for _ in range(2):
        said = again(node, 61)
        why = "the test of [repair] failed: sh exited with code 4: bandwidth 3 GB/s, limit 20"
        assert why in said

    assert node.state == "IDLE+DRAIN"
    assert events(node)[1:] == [(EventKind.ADMINISTRATOR, why)]
    assert steps(node) == [("test", "failed"), ("administrator", "done")]


def test_a_test_that_a_reboot_has_cut_off_is_begun_again_once(node: Node) -> None:
    awaits_its_test(node, "exit 0")
    ended(node)
    begun_at_s = node.now_s
    cut_off = RepairAttempt(
        node="n3", step=RepairStep.TEST, time_s=begun_at_s, drain=note(node), until_s=begun_at_s
    )
    repair.save_attempt(node.site, cut_off)
    assert "the test of [repair] begins" in again(node, 61)
    ended(node)
    assert "released after" in again(node, 61)


def test_a_node_of_an_administrator_returns_by_a_test(node: Node, slurm: HookedSlurm) -> None:
    for _ in range(4):  # drains of one day
        slurm.set({"n3": ("IDLE", "")})
        node.now_s += 61
        faulty(node)
    node.mend()
    assert "the test" not in again(node, 61)

    node.more += "[repair]\ntest = ['true']\n"
    assert "the test of [repair] begins" in again(node, 61)
    ended(node)
    assert "released after the test of [repair]" in again(node, 61)


# --- a step as it is taken -----------------------------------------------------------------------


def gpus(**of_first: object) -> Gpus:
    first = GpuDevice(index=0, bus="00000000:3B:00.0", processes=())
    first = msgspec.structs.replace(first, **of_first)
    return Gpus(devices=(first, GpuDevice(index=1, bus="00000000:5E:00.0", processes=())))


def reset(node: Node, here: Gpus, *devices: str) -> tuple[RepairAttempt, str]:
    trace = node.directory / "resets"
    node.more = f"[repair]\nreset = ['sh', '-c', 'echo $0 >>{trace}', '{{gpus}}']\n"
    ended = repair.take(node.site, begun(), devices, lambda: here)
    return ended, trace.read_text() if trace.exists() else ""


@rows
def test_the_gpus_at_fault_are_reset_or_all_if_they_are_not_known(
    node: Node, devices: list[str], expected: str
) -> None:
    attempt, trace = reset(node, gpus(), *devices)

    assert (attempt.outcome, trace) == (Outcome.DONE, expected)


@rows
def test_a_gpu_that_may_be_in_use_is_not_reset(node: Node, here: Gpus, why: str) -> None:
    attempt, trace = reset(node, here, "0000:3b:00")

    assert (attempt.outcome, trace) == (Outcome.FAILED, "")
    assert why in attempt.text


def test_a_command_that_fails_or_is_not_there_is_a_failed_step(node: Node) -> None:
    for argv, why in (
        ("['sh', '-c', 'echo busy; exit 3']", "sh exited with code 3: busy"),
        ("['/nowhere/x']", "/nowhere/x cannot be run: No such file or directory"),
    ):
        node.more = f"[repair]\ntest = {argv}\n"
        attempt = repair.take(node.site, begun(RepairStep.TEST), (), Gpus)
        assert (attempt.outcome, attempt.text) == (Outcome.FAILED, why)
