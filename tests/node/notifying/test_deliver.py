# SPDX-License-Identifier: Apache-2.0
"""From a hook that drains to whoever is told: nothing waits, nothing is lost, nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_health.cli.nodes import notify
from slurm_health.node import event_queue
from slurm_health.node.draining import shared_state
from slurm_health.node.hooks.__main__ import run
from slurm_health.node.notifying import deliver, standing
from slurm_health.node.rules.notices import EventKind, NodeEvent
from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node
from tests.support.listener import Listener

WAIT_S = 120.0


def told(listener: Listener, fold_s: float = 30, more: str = "") -> str:
    table = f"[notify]\nfold_s = {fold_s}\n[notify.targets.ops]\nurl = '{listener.url}'\n"
    return f"{table}limit_s = 50\n{more}"


def delivered(node: Node, patience_s: float = WAIT_S) -> list[str]:
    """Deliver from a node, whose clock stands still but for its own waits; what it says."""
    said: list[str] = []

    def sleep(wait_s: float) -> None:
        node.now_s += wait_s

    deliver(
        node.site,
        node.name,
        lambda level, text: said.append(f"{level}: {text}"),
        now=lambda: node.now_s,
        sleep=sleep,
        patience_s=patience_s,
    )
    return said


def kinds(listener: Listener) -> list[tuple[str, str]]:
    return [(each["kind"], each["nodes"]) for each in listener.documents]


@pytest.mark.heavy
def test_a_drain_a_release_and_a_relapse_are_told(node: Node, listener: Listener) -> None:
    node.more = told(listener)
    for _ in range(2):
        node.break_it()
        assert node.healthcheck()
        delivered(node)
        node.mend()
        for _ in range(3):
            node.now_s += 61
            node.healthcheck()
        delivered(node)

    expected = ["drained", "released", "relapse", "released"]
    assert kinds(listener) == [(kind, "n3") for kind in expected]
    first = listener.documents[0]["events"][0]
    assert first["text"] == "/broken exists"
    assert first["checks"] == ["scratch"]
    assert event_queue.is_empty(node.site.state)


def test_a_well_node_and_one_whose_site_tells_nobody_leave_nothing(
    node: Node, listener: Listener
) -> None:
    node.break_it()
    assert node.healthcheck()
    assert event_queue.is_empty(node.site.state)

    node.more = told(listener)
    node.mend()
    node.healthcheck()
    assert delivered(node) == []
    assert listener.received == []


def test_a_node_that_a_person_has_returned_is_told(
    node: Node, slurm: FakeScontrol, listener: Listener
) -> None:
    node.more = told(listener)
    node.break_it()
    node.healthcheck()
    delivered(node)
    slurm.set({"n3": ("IDLE", "")})
    node.mend()
    node.healthcheck()
    delivered(node)

    assert kinds(listener) == [("drained", "n3"), ("released", "n3")]
    assert listener.documents[1]["events"][0]["text"] == "it was returned to the pool"


@pytest.mark.heavy
def test_nodes_that_fail_together_are_one_message_and_the_breaker_is_told_once(
    rack: list[Node], listener: Listener
) -> None:
    for node in rack[:8]:
        node.more = told(listener)
        node.break_it()
        node.healthcheck()
        delivered(node, patience_s=0)  # each takes its own to the others, and does not wait
    assert listener.received == []
    delivered(rack[0])

    assert kinds(listener) == [("drained", "n[1-4]"), ("breaker", "n5")]
    assert "a fabric or software problem" in listener.documents[1]["events"][0]["text"]


def test_what_could_not_be_sent_is_sent_later_by_any_node(
    rack: list[Node], listener: Listener
) -> None:
    for node in rack[:2]:
        node.more = told(listener)
    listener.answer(500, "down")
    rack[0].break_it()
    rack[0].healthcheck()
    said = delivered(rack[0], patience_s=40)
    assert said == ["warning: ops was not told: drained of n1: http://127.0.0.1 answered 500: down"]
    assert standing(rack[1].site).waiting == {"ops": 1}

    listener.answer(200)
    rack[1].now_s = rack[0].now_s + 300
    said = delivered(rack[1])
    assert said == ["info: ops was told: drained of n1: http://127.0.0.1 answered 200"]
    assert standing(rack[1].site).waiting == {}


def test_events_wait_on_the_node_while_the_shared_directory_is_away(
    node: Node, shared: Path, listener: Listener
) -> None:
    node.more = told(listener)
    node.break_it()
    node.healthcheck()
    away = shared.rename(shared.with_name("away"))

    assert "events wait on this node" in delivered(node)[0]
    assert not event_queue.is_empty(node.site.state)
    away.rename(shared)
    delivered(node)
    assert kinds(listener) == [("drained", "n3")]


@pytest.mark.parametrize("text", ["", "{", '{"waiting": 3}', "\0\0"])
def test_a_garbled_post_or_event_is_left_behind(
    node: Node, shared: Path, listener: Listener, text: str
) -> None:
    node.more = told(listener)
    (shared / "notify.json").write_text(text)
    node.break_it()
    node.healthcheck()
    (node.site.state / "events" / "bad.json").write_text(text)
    delivered(node)

    assert kinds(listener) == [("drained", "n3")]
    assert event_queue.is_empty(node.site.state)


def test_no_more_events_are_kept_than_there_is_room_for(node: Node, listener: Listener) -> None:
    node.more = told(listener)
    for number in range(505):
        drained = NodeEvent(kind=EventKind.DRAINED, node=f"n{number}", time_s=node.now_s, text="x")
        event_queue.tell(node.site, drained)

    assert len(event_queue.read(node.site.state)) == 500
    assert delivered(node)[0].startswith("info: ops was told: drained of n[")


def test_only_root_can_read_what_waits(node: Node, shared: Path, listener: Listener) -> None:
    node.more = told(listener)
    node.break_it()
    node.healthcheck()
    (path,) = event_queue.read(node.site.state)
    assert path.stat().st_mode & 0o077 == 0
    delivered(node, patience_s=0)
    assert (shared / "notify.json").stat().st_mode & 0o077 == 0


def test_a_hook_starts_whoever_delivers_and_does_not_wait(
    node: Node, listener: Listener, until: Callable[[Callable[[], bool], str], None]
) -> None:
    node.more = told(listener, fold_s=0)
    (node.directory / "flag").touch()
    node.more += f"[checks.real]\ncheck = 'file'\npath = '{node.directory}/flag'\nexists = false\n"
    node.more += "contexts = ['prolog']\n"
    # The hook as slurmd runs it looks at this machine, which has no 400 GiB.
    site = node.site
    run("prolog", site, node.environ(7))

    until(lambda: bool(listener.received), "the message")
    assert "n3" in kinds(listener)[0][1]


def call(node: Node, *words: str) -> tuple[int, str]:
    _ = node.site
    config = ["--config", str(node.directory / "etc/config.toml")]
    result = CliRunner().invoke(notify, [*config, *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


def test_a_test_message_says_of_each_target_what_came_back(
    node: Node, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    node.more = told(listener, more="events = ['ticket']\n")
    node.more += "[notify.targets.bad]\ncommand = ['/nowhere/ticket']\n"
    code, text = call(node, "--test")

    assert code == 1
    assert "ops: http://127.0.0.1 answered 200: ok\n" in text
    assert "bad: /nowhere/ticket cannot be run: No such file or directory\n" in text
    (document,) = listener.documents
    assert document["text"] == "slurm-health: n3: test message, nothing has happened"


def test_the_list_says_who_is_told_of_what_and_what_does_not_arrive(
    node: Node, listener: Listener
) -> None:
    assert "no one is notified of anything" in call(node)[1]
    node.more = told(listener)
    assert call(node) == (0, "ops: all events, as json to a webhook\n")
    listener.answer(500, "down")
    node.break_it()
    node.healthcheck()
    delivered(node, patience_s=40)
    code, text = call(node)

    assert code == 1
    assert "1 event to be told" in text
    assert "not taken once: http://127.0.0.1 answered 500: down" in text


@pytest.mark.heavy
def test_a_breaker_that_has_tripped_is_kept_though_nobody_listens(
    rack: list[Node], listener: Listener
) -> None:
    listener.answer(503)
    for node in rack[:6]:
        node.more = told(listener)
        node.break_it()
        node.healthcheck()
        delivered(node, patience_s=0)
    assert shared_state.read_ledger(rack[0].site.breaker).trips
    waiting = json.loads((rack[0].shared / "notify.json").read_text())["waiting"]
    assert [each["event"]["kind"] for each in waiting].count("breaker") == 1
