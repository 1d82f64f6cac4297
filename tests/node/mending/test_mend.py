# SPDX-License-Identifier: Apache-2.0
"""A drained node that stays faulty is mended by steps, and nothing is done to anybody else's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import event_queue
from slurm_health.node.draining import QUARANTINE, own_drain
from slurm_health.node.hooks import nodes
from slurm_health.node.mending import ledger, perform, quarantine
from slurm_health.node.mending.quarantine import Quarantine
from slurm_health.node.rules.mending import Outcome, Step, Tried
from slurm_health.node.rules.notices import EventKind
from slurm_health.records.nodeset import expand
from slurm_health.system.nvml import Device, Gpus
from slurm_health.system.slurm.client import Client
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node

NOTIFY = "[notify.targets.ops]\ncommand = ['/bin/cat']\n"


def mended(node: Node, steps: str, more: str = "", first: str = "reload") -> None:
    """Have a site mend its nodes: what reloads the driver leaves a trace."""
    reload = f"reload = ['sh', '-c', 'echo reloaded >>{node.directory}/reloads']"
    node.more = (
        f"[mend]\nenabled = true\ndry_run = false\nsteps = [{steps}]\n{reload}\n{more}\n"
        f"[mend.first]\nscratch = '{first}'\n{NOTIFY}"
    )


def again(node: Node, seconds: float = 300) -> str:
    node.now_s += seconds
    node.healthcheck()
    return node.said


def steps(node: Node) -> list[tuple[str, str]]:
    return [(each.step.value, each.outcome.value) for each in ledger.look(node.site)]


def until(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + 55
    while not condition():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.05)


def faulty(node: Node) -> None:
    node.break_it()
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"


def events(node: Node) -> list[tuple[EventKind, str]]:
    found = event_queue.read(node.site.state).values()
    return [(each.kind, each.text) for each in found if each is not None]


def rebooted(slurm: FakeScontrol) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("reboot")]


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
    (ticket,) = [e for e in event_queue.read(node.site.state).values() if e and e.kind is told[3]]
    assert any(line.startswith("drained with: shealth:scratch") for line in ticket.evidence)
    assert any(line.startswith("reboot at 1000600: failed") for line in ticket.evidence)
    assert node.state == "IDLE+DRAIN"


def note(node: Node) -> str:
    return node.reason.partition(" : ")[0].partition(" [")[0]


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
    assert "2 steps within the hour, limit of all nodes" in rack[2].said


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
    gone = msgspec.structs.replace(begun(Step.REBOOT), node="cloud7", until_s=rack[1].now_s)
    ledger.keep(rack[1].site, gone)
    again(rack[1])
    asked = len(slurm.calls())
    again(rack[1])

    text = "cloud7 is not back from its reboot"
    assert events(rack[1]) == [(EventKind.STEP_FAILED, text), (EventKind.TICKET, text)]
    assert len(slurm.calls()) == asked


def test_a_quarantine_that_its_node_has_forgotten_is_told_by_another(
    rack: list[Node], slurm: FakeScontrol
) -> None:
    mended(rack[1], "'ticket'")
    lost = msgspec.structs.replace(begun(Step.DEEP_TEST), node="n1", until_s=rack[1].now_s)
    ledger.keep(rack[1].site, lost)
    slurm.set({"n1": ("IDLE+MAINTENANCE+RESERVED", "")})
    rack[1].now_s += 3601
    rack[1].healthcheck()

    text = "n1 is not back from quarantine: scontrol show reservation shealth-n1"
    assert events(rack[1]) == [(EventKind.STEP_FAILED, text), (EventKind.TICKET, text)]


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


def test_a_reservation_that_fails_leaves_the_node_drained_as_it_was(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
    slurm.trouble('case "$1" in create) echo Invalid user >&2; exit 1;; esac')
    slurm.trouble(
        'case "$1 $2" in "create reservation") echo Invalid user >&2; exit 1;;'
        ' "show reservation") echo Reservation not found >&2; exit 1;; esac'
    )
    before = node.reason

    assert "mending: deep_test failed: it could not be begun" in again(node)
    assert (node.state, node.reason) == ("IDLE+DRAIN", before)


def due_back(node: Node, more: str = "", steps: str = "'deep_test'") -> str:
    """Drain a node for what then passes, until it may come back; return what is said then."""
    mended(node, steps, f"deep_test = ['true']\n{more}", first="ticket")
    faulty(node)
    node.mend()
    return "".join(again(node, 61) for _ in range(3))


@pytest.mark.parametrize(
    ("more", "steps_allowed"), [("burn_in_h = 0", "'deep_test'"), ("", "'ticket'")]
)
def test_without_a_burn_in_a_node_comes_back_once_it_has_passed(
    node: Node, more: str, steps_allowed: str
) -> None:
    assert "released after 3 passes" in due_back(node, more, steps_allowed)
    assert node.state == "IDLE"


def test_a_dry_run_says_what_burn_in_there_would_be_and_the_node_comes_back(node: Node) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="ticket")
    node.more = node.more.replace("dry_run = false", "")
    faulty(node)
    node.mend()
    said = "".join(again(node, 61) for _ in range(3))

    assert "dry run: for 24 h before it comes back" in said
    assert node.state == "IDLE"


def test_a_node_whose_burn_in_cannot_be_begun_comes_back_and_a_person_is_told(
    node: Node, slurm: FakeScontrol
) -> None:
    slurm.trouble(
        'case "$1 $2" in "create reservation") echo Invalid user >&2; exit 1;;'
        ' "show reservation") exit 0;; esac'
    )
    said = due_back(node)

    assert "mending: deep_test failed: it could not be begun" in said
    assert "Invalid user" in said
    assert node.state == "IDLE"
    assert EventKind.STEP_FAILED in [kind for kind, _ in events(node)]


def test_a_burn_in_waits_until_the_hour_allows_one_more_step(node: Node) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']\nper_hour = 1", first="ticket")
    other = msgspec.structs.replace(begun(Step.REBOOT), node="n9", time_s=node.now_s)
    faulty(node)
    ledger.keep(node.site, other)
    node.mend()
    said = "".join(again(node, 61) for _ in range(3))

    assert "not released: it waits for its burn-in: 1 steps within the hour" in said
    assert node.state == "IDLE+DRAIN"


def test_a_node_on_which_a_job_still_runs_waits_for_its_burn_in(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="ticket")
    faulty(node)
    node.mend()
    slurm.set({"n3": ("MIXED+DRAIN", note(node))})
    said = "".join(again(node, 61) for _ in range(3))

    assert "not released: it waits for its burn-in: it is MIXED+DRAIN" in said
    assert node.state == "MIXED+DRAIN"


@pytest.mark.parametrize(("fails_in", "code", "text"), [(0, 0, "run 4"), (3, 7, "in run 3: run 3")])
def test_a_burn_in_repeats_the_test_until_its_time_has_passed_or_it_fails(
    node: Node, fails_in: int, code: int, text: str
) -> None:
    counted = node.directory / "runs"
    script = (
        f"echo >>{counted}; n=$(wc -l <{counted}); echo run $n;"
        f" test $n -ne {fails_in} || exit {code or 1}"
    )
    node.more = f'[mend]\ndeep_test = ["sh", "-c", "{script}"]\n'
    node.site.state.mkdir(parents=True)
    # A look at the clock is half an hour later than the one before: at 0, 0.5, 1, 1.5 and 2 h.
    times = iter(range(0, 20_000, 1800))
    quarantine.run_test(node.site, 4711, hours=2.0, clock_s=lambda: float(next(times)))

    data = (node.site.state / "deep-test.json").read_bytes()
    result = msgspec.json.decode(data, type=quarantine.TestResult)
    assert (result.job, result.code, result.said) == (4711, code, text)


def test_a_reservation_that_a_late_slurmctld_makes_without_an_answer_does_not_stay(
    node: Node, slurm: FakeScontrol
) -> None:
    mended(node, "'deep_test'", "deep_test = ['true']", first="deep_test")
    faulty(node)
    slurm.trouble(
        'case "$1 $2" in'
        ' "create reservation") touch $dir/made; echo Zero Bytes were transmitted >&2; exit 1;;'
        ' "show reservation") [ ! -f $dir/made ] || echo "ReservationName=shealth-n3 Nodes=n3";'
        " exit;;"
        ' "delete ReservationName=shealth-n3") rm $dir/made; exit;; esac'
    )

    assert "mending: deep_test failed: it could not be begun" in again(node)
    assert any(call.startswith("create reservation") for call in slurm.calls())
    assert not (slurm.directory / "made").exists()
    assert node.state == "IDLE+DRAIN"


def test_a_quarantine_ends_though_mending_was_switched_off_meanwhile(
    node: Node, slurm: FakeScontrol
) -> None:
    faulty(node)
    kept, state = own_drain.recall(node.site.state), node.site.state
    assert kept is not None
    lost = Quarantine(kept=kept, reservation="shealth-n3", job=7, step=begun(Step.DEEP_TEST))
    (state / QUARANTINE).write_bytes(msgspec.json.encode(lost))
    own_drain.forget(state)
    slurm.set({"n3": ("IDLE", "")})
    slurm.trouble('case "$1 $2" in "show reservation") exit;; esac')

    assert "its reservation was deleted" in again(node)
    assert not (state / QUARANTINE).exists()
    assert node.state == "IDLE+DRAIN"  # it is faulty still, and can be drained again


def begun(step: Step = Step.RESET) -> Tried:
    return Tried(node="n3", step=step, time_s=1.0, drain="d", until_s=1801.0)


def gpus(**of_first: object) -> Gpus:
    first = Device(index=0, bus="00000000:3B:00.0", processes=())
    first = msgspec.structs.replace(first, **of_first)
    return Gpus(devices=(first, Device(index=1, bus="00000000:5E:00.0", processes=())))


def reset(node: Node, seen: Gpus, *devices: str, why_not: str = "") -> tuple[Tried, str]:
    trace = node.directory / "resets"
    node.more = f"[mend]\nreset = ['sh', '-c', 'echo $0 >>{trace}', '{{gpus}}']\n"
    found = perform.take(node.site, begun(), devices, why_not=lambda: why_not, look=lambda: seen)
    return found, trace.read_text() if trace.exists() else ""


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["0000:3b:00"], "00000000:3B:00.0\n"),
        (["00000000:5E:00.0"], "00000000:5E:00.0\n"),
        ([], "00000000:3B:00.0,00000000:5E:00.0\n"),
    ],
)
def test_the_gpus_at_fault_are_reset_or_all_where_they_are_not_known(
    node: Node, devices: list[str], expected: str
) -> None:
    found, trace = reset(node, gpus(), *devices)

    assert (found.outcome, trace) == (Outcome.DONE, expected)


@pytest.mark.parametrize(
    ("of_first", "why"),
    [
        ({"processes": (4711,)}, "GPU 0 is in use by processes 4711"),
        ({"processes": None}, "does not tell which processes use it"),
        ({"fabric_state": "in progress"}, "just joining the NVLink fabric"),
        ({"bus": "00000000:AA:00.0"}, "NVML shows no GPU at 0000:3b:00"),
    ],
)
def test_a_gpu_that_may_be_in_use_is_not_reset(
    node: Node, of_first: dict[str, object], why: str
) -> None:
    found, trace = reset(node, gpus(**of_first), "0000:3b:00")

    assert (found.outcome, trace) == (Outcome.FAILED, "")
    assert why in found.text


def test_a_person_who_was_quicker_keeps_the_step_from_being_taken(node: Node) -> None:
    found, trace = reset(node, gpus(), why_not="it is IDLE")

    assert (found.outcome, found.text, trace) == (Outcome.FAILED, "it is IDLE", "")


def test_a_command_that_fails_or_is_not_there_is_a_failed_step(node: Node) -> None:
    for argv, why in (
        ("['sh', '-c', 'echo busy; exit 3']", "sh ended with code 3: busy"),
        ("['/nowhere/x']", "/nowhere/x cannot be run: No such file or directory"),
    ):
        node.more = f"[mend]\nreload = {argv}\n"
        found = perform.take(node.site, begun(Step.RELOAD), (), why_not=lambda: "")
        assert (found.outcome, found.text) == (Outcome.FAILED, why)


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
