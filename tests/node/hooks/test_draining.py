# SPDX-License-Identifier: Apache-2.0
"""Draining, when others are at it too: hooks of this node, other nodes, administrators."""

import os
from collections.abc import Sequence

import msgspec
import pytest

from slurm_health.node import drain, shared, state
from slurm_health.node.drain import Cause, DrainStatus, drain_node
from slurm_health.node.hooks import nodes, prolog
from slurm_health.node.notify import EventKind
from slurm_health.node.rules import drain_note
from slurm_health.system.slurm.client import Client
from tests.support.accusing import JOB, Story, journal, judged
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.notified import into_file, received


def updates(slurm: HookedSlurm) -> list[str]:
    return [call for call in slurm.calls() if call.startswith("update")]


def drained_by_a_job(node: Node, component: str, job: int = JOB) -> None:
    """Let root's own check drain the node, as its job does."""
    cause = Cause(checks=(component,), text="no allgather", job=job, uid=0, hook="check")
    controller = Client.for_hook(node.environ(), limit_s=5)
    result = drain_node(node.site, node.name, cause, controller=controller, now_s=node.now_s)
    assert result.status is DrainStatus.DRAINED


# --- an administrator --------------------------------------------------


def test_a_drain_by_an_administrator_just_before_ours_stays(node: Node, slurm: HookedSlurm) -> None:
    """Between the first look and the drain lies the wait for the ledger."""
    node.break_it()
    theirs = "fan [ada@2026-01-02T03:04:05]"
    looks = 'case "$1 $2" in "show topology") $dir/set n3 IDLE+DRAIN "{theirs}" ;; esac'
    slurm.trouble(looks.format(theirs=theirs))
    assert node.prolog()
    assert node.reason == "fan [ada@2026-01-02T03:04:05]"
    assert updates(slurm) == []
    assert state.load_record(node.site.state) is None
    assert shared.read_ledger(node.site.breaker).entries == ()


# --- hooks of this node --------------------------------------------------


def at_once(node: Node, jobs: Sequence[int]) -> list[int]:
    """Run the prologs of several jobs at once; the exit code of each."""
    pids, site = [], node.site
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                environ = node.environ(job, uid=job)
                code = int(prolog.run(node.hook("prolog", environ, site)))
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_eight_prologs_at_once_drain_once(node: Node, slurm: HookedSlurm) -> None:
    node.break_it()
    assert at_once(node, range(100, 108)) == [1] * 8
    assert len(updates(slurm)) == 1
    assert node.record.reason == drain_note.unsigned(node.reason)
    assert len(shared.read_ledger(node.site.breaker).entries) == 1


def test_a_record_that_is_newer_than_what_a_hook_has_read_stays(node: Node) -> None:
    node.break_it()
    node.prolog(job=7)
    old = node.record
    node.slurm.set({"n3": ("IDLE", "")})
    node.now_s += 60
    node.prolog(job=8)
    new = state.load_record(node.site.state)
    state.replace_record(node.site.state, old, old)
    assert state.load_record(node.site.state) == new != old
    controller = Client.for_hook(node.environ(), limit_s=5)
    assert "drained again" in drain.release_own(node.site, old, controller)
    assert node.state == "IDLE+DRAIN"


# --- a job of root's --------------------------------------------------


def test_a_node_a_job_drained_returns_once_its_test_passes(story: Story) -> None:
    node = story.node
    drained_by_a_job(node, "node")
    story.write(journal())
    node.break_it()
    assert story.ended()
    reason = node.reason
    assert "check=node" in reason
    node.mend()
    for _ in range(3):
        node.now_s += 61
        node.healthcheck()
    assert node.state == "IDLE"
    assert len(updates(node.slurm)) == 2  # one drain, one release


@pytest.mark.parametrize("component", ["network", "node"])
def test_a_node_without_a_failed_test_waits_for_a_person(story: Story, component: str) -> None:
    node = story.node
    drained_by_a_job(node, component)
    story.write(journal(judged()))
    story.ended()
    assert state.load_record(node.site.state) is None


@pytest.mark.parametrize("call", range(1, 6))
def test_a_killed_hook_is_finished_by_the_next(node: Node, slurm: HookedSlurm, call: int) -> None:
    slurm.trouble(f'[ "$(grep -vc -e --version $dir/calls)" = {call} ] && kill -9 $PPID\n')
    node.break_it()
    assert at_once(node, [7]) == [-9]
    node.now_s += 60
    assert node.prolog(job=8, uid=8)
    assert node.state == "IDLE+DRAIN"
    assert node.record.reason == drain_note.unsigned(node.reason)
    within = {entry.node for entry in shared.read_ledger(node.site.breaker).entries}
    assert within == {"n3"}


# --- the ledger --------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    ["Socket timed out on send/recv operation", "Zero Bytes were transmitted or received"],
)
def test_drains_that_slurm_may_do_yet_count_against_the_share(
    rack: list[Node], slurm: HookedSlurm, answer: str
) -> None:
    """slurmctld drains what it was told to drain, whether or not somebody still waits for that."""
    slurm.trouble(
        f'[ "$1" = update ] && echo $2 >> $dir/told && echo "error: {answer}" >&2 && exit 1\n'
    )
    for number, each in enumerate(rack[:6]):
        each.break_it()
        assert not each.prolog(job=100 + number, uid=1000 + number)  # the job starts
    told = (slurm.directory / "told").read_text().split()
    assert told == [f"NodeName={each.name}" for each in rack[:4]]  # a fifth of twenty
    assert "unclear: Slurm has not confirmed it" in rack[0].said
    assert "the breaker of gpu has tripped" in rack[5].said


def test_a_drain_that_slurm_does_not_answer_in_time_counts(node: Node, slurm: HookedSlurm) -> None:
    slurm.trouble('[ "$1" = update ] && sleep 3600\n')

    def runs_out_at_the_drain() -> float:
        return 99.9 if len(slurm.calls()) >= 3 else 0.0

    controller = Client(
        node.environ(), patience_s=0, give_up_s=100, monotonic=runs_out_at_the_drain
    )
    cause = Cause(checks=("flag",), text="it is broken", hook="prolog")
    result = drain_node(node.site, node.name, cause, controller=controller, now_s=node.now_s)
    assert result.status is DrainStatus.UNCLEAR
    (entry,) = shared.read_ledger(node.site.breaker).entries
    assert entry.node == node.name


def test_a_refused_drain_is_no_return_by_a_person(node: Node, slurm: HookedSlurm) -> None:
    slurm.trouble('[ "$1" = update ] && echo "error: Access/permission denied" >&2 && exit 1\n')
    node.break_it()
    assert not node.prolog()
    slurm.trouble("")
    assert node.healthcheck()
    assert "a drain that was begun never took effect: shealth: " in node.said
    assert "it was returned to the pool" not in node.said
    assert node.state == "IDLE+DRAIN"


@pytest.mark.heavy
def test_after_a_trip_a_faulty_node_asks_nothing(rack: list[Node], slurm: HookedSlurm) -> None:
    for each in rack[:8]:
        each.break_it()
        each.healthcheck()
    before = shared.read_ledger(rack[0].site.breaker)
    asked = len(slurm.calls())
    for each in rack[5:8]:
        assert not each.prolog()
        assert "the breaker of gpu has tripped" in each.said
    assert len(slurm.calls()) == asked
    assert shared.read_ledger(rack[0].site.breaker) == before


def test_a_rack_that_fails_trips_its_own_breaker(rack: list[Node], slurm: HookedSlurm) -> None:
    slurm.below(leaf1="n[1-5]", leaf2="n[6-20]")
    for each in (*rack[:3], rack[5]):
        each.break_it()
        each.healthcheck()
    assert [each.state for each in rack[:3]] == ["IDLE+DRAIN", "IDLE+DRAIN", "IDLE"]
    assert "n[1-3] would be drained, now or within 60 min: 3 of 5 nodes of switch leaf1" in (
        rack[2].said
    )
    rack[3].break_it()
    rack[3].healthcheck()
    assert "the breaker of switch leaf1 has tripped" in rack[3].said
    assert rack[5].state == "IDLE+DRAIN"  # three of twenty nodes of the partition, limit four


def test_a_node_whose_clock_is_a_day_ahead_forgets_nothing(rack: list[Node]) -> None:
    for number, each in enumerate(rack[:5]):
        each.break_it()
        each.now_s += 86_400 if number == 2 else 0
        each.prolog(job=100 + number, uid=number)
        each.slurm.set({each.name: ("IDLE", "")})
    ledger = shared.read_ledger(rack[0].site.breaker)
    assert len(ledger.entries) == 4
    assert "gpu" in ledger.trips


def test_a_fourth_drain_a_day_waits_for_a_person(node: Node, slurm: HookedSlurm) -> None:
    node.break_it()
    for job in range(1, 5):
        slurm.set({"n3": ("IDLE", "")})
        node.now_s += 3600
        assert node.prolog(job=job, uid=job)
        assert node.record.retest == (() if job == 4 else ("scratch",))
    assert "an administrator has to release it" in node.said


# --- a shared filesystem that does not answer ----------------------------------------------------


def silent(node: Node) -> Node:
    """Let nobody read the ledger: whoever opens it waits."""
    ledger = node.shared / "ledger.1"
    if not ledger.exists():
        os.mkfifo(ledger)
    node.timing = msgspec.structs.replace(node.timing, lock_s=0.1)
    return node


def test_if_all_lose_it_two_are_drained_and_the_server_is_blamed(rack: list[Node]) -> None:
    for each in rack[:4]:
        silent(each).more = into_file(each)
        each.break_it()
        each.healthcheck()
    assert [each.state for each in rack[:4]] == ["IDLE+DRAIN", "IDLE+DRAIN", "IDLE", "IDLE"]
    assert rack[0].record.confirmed
    assert "2 other nodes are drained for scratch: a problem of the server" in rack[3].said
    alarms = [
        event.text
        for each in rack[:4]
        for event in received(each)
        if event.kind is EventKind.BREAKER
    ]
    (alarm,) = alarms
    assert alarm.startswith("n1, n2: /broken exists: a problem of the server")


def test_the_last_of_several_drains_gives_way(rack: list[Node], slurm: HookedSlurm) -> None:
    third = silent(rack[2])
    third.break_it()
    others = "; ".join(
        f"$dir/set {name} IDLE+DRAIN 'shealth: x check=scratch job=0 t=999999'"
        for name in ("n1", "n2")
    )
    slurm.trouble(f'[ "$1" = update ] && {{ {others}; }}')
    assert not third.prolog()
    assert "lifted again: 2 other nodes are drained for scratch" in third.said
    assert third.state == "IDLE"
    assert state.load_record(third.site.state) is None


# --- faults of one kind and of several -----------------------------------------------------------


def test_different_faults_are_drained_until_the_share_is_reached(rack: list[Node]) -> None:
    """Of twenty nodes with a share of 5 %, two may be out for one fault, and four for any."""
    for number, each in enumerate(rack[:6]):
        each.more = f"[checks.fault{number}]\ncheck = 'file'\npath = '/broken'\nexists = false\n"
        each.text = each.text.replace("share = 0.2", "share = 0.05").replace(
            "[checks.scratch]", "[checks.scratch]\nenabled = false"
        )
        each.break_it()
        each.healthcheck()
    assert [each.state for each in rack[:6]] == ["IDLE+DRAIN"] * 4 + ["IDLE"] * 2
    assert "5 nodes, 5 different faults" in rack[4].said
    assert "the breaker of gpu has tripped" in rack[5].said


def test_a_breaker_that_tripped_for_one_fault_lets_another_be_drained(rack: list[Node]) -> None:
    for each in rack:
        each.text = each.text.replace("share = 0.2", "share = 0.05")
    for each in rack[:4]:
        each.break_it()
        each.healthcheck()
    other = rack[4]
    other.more = "[checks.disk]\ncheck = 'file'\npath = '/worn'\nexists = false\n"
    (other.machine / "worn").touch()
    other.healthcheck()
    assert [each.state for each in rack[1:5]] == ["IDLE+DRAIN", "IDLE", "IDLE", "IDLE+DRAIN"]


def test_a_node_that_an_administrator_ignores_is_not_drained_until_then(node: Node) -> None:
    until_s = node.now_s + 3600
    nodes.ignore(node.site, ["n3"], until_s, by="ada", why="benchmark until Friday")
    node.break_it()
    assert not node.prolog()
    assert "ada has it ignored for another 1 h: benchmark until Friday" in node.said
    known = Client.for_hook(node.environ(), limit_s=5).nodes()
    text = nodes.text(nodes.listing(node.site, known, node.now_s), node.now_s)
    assert "ignored: n3 for 1 h, by ada: benchmark until Friday" in text
    node.now_s = until_s + 1
    assert node.prolog()
