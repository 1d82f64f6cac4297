# SPDX-License-Identifier: Apache-2.0
"""Events of nodes reach the site's command or URLs, and no hook waits for either."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_health.cli import site_setup
from slurm_health.node import notify
from slurm_health.node.notify import EventKind, NodeEvent, send_and_wait
from slurm_health.node.rules.settings import Notify
from tests.node.listener import Listener, listening
from tests.support.hooked_node import Node
from tests.support.notified import into_file, received, wait_for_senders
from tests.support.rows import rows

# On Python 3.11 apprise loads a module that is gone later.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr'")

EVENT = NodeEvent(
    kind=EventKind.ADMINISTRATOR,
    node="n3",
    time_s=1_000_000.0,
    text="GPU 3 is lost",
    checks=("gpu",),
    job=7,
    evidence=("reset at 5: failed",),
)
needs_apprise = pytest.mark.skipif(
    importlib.util.find_spec("apprise") is None, reason="apprise is not installed"
)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with listening(tmp_path / "listener") as found:
        yield found


def test_a_command_reads_one_event_as_json_for_each_thing_that_happens(node: Node) -> None:
    node.more = into_file(node)
    node.healthcheck()
    assert received(node) == []
    node.break_it()
    node.healthcheck()
    node.mend()
    for _ in range(3):
        node.now_s += 300
        node.healthcheck()
    node.now_s += 300
    node.break_it()
    node.healthcheck()

    drained, released, relapse = received(node)
    assert (drained.kind, drained.node, drained.checks) == (EventKind.DRAINED, "n3", ("scratch",))
    assert (drained.version, drained.source, drained.cluster) == (1, "slurm-health", "c1")
    assert (drained.time, drained.text) == ("1970-01-12T13:46:40Z", "/broken exists")
    assert drained.summary == "slurm-health: c1: n3: drained"
    assert (released.kind, relapse.kind) == (EventKind.RELEASED, EventKind.RELAPSE)


def test_the_breaker_is_told_once(rack: list[Node]) -> None:
    for each in rack[:7]:
        each.more = into_file(each)
        each.break_it()
        each.healthcheck()
    kinds = [event.kind for each in rack[:7] for event in received(each)]
    assert kinds == [EventKind.DRAINED] * 4 + [EventKind.BREAKER]


def test_a_command_that_hangs_delays_no_hook(node: Node, tmp_path: Path) -> None:
    began = tmp_path / "began"
    script = f"echo $$ >{began}; sleep 600 & wait"
    node.more = f"[notify]\nlimit_s = 3\ncommand = ['sh', '-c', '{script}']\n"
    node.break_it()
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"
    assert not began.exists() or Path(f"/proc/{began.read_text().strip()}").exists()

    wait_for_senders()
    assert not Path(f"/proc/{began.read_text().strip()}").exists()


@rows
def test_why_a_command_failed_is_returned(command: tuple[str, ...], why: str) -> None:
    assert send_and_wait(Notify(command=command, limit_s=0.5), EVENT) == [(command[0], why)]


def test_a_long_event_is_cut_before_it_is_sent(node: Node) -> None:
    node.more = into_file(node)
    notify.send(
        node.site,
        NodeEvent(
            kind=EventKind.ADMINISTRATOR,
            node="n3",
            time_s=1e300,
            text="x" * 9999,
            evidence=("a\nb",) * 99,
        ),
    )
    (event,) = received(node)
    assert len(event.text) <= 600
    assert event.evidence == ("a b",) * 30
    assert event.time == "t=1e+300"


@needs_apprise
def test_apprise_sends_what_happened_with_its_evidence(listener: Listener, tmp_path: Path) -> None:
    secret = tmp_path / "urls"
    secret.write_text(f"# chat\n{listener.url.replace('http', 'json')}/second\n")
    secret.chmod(0o600)
    urls = (listener.url.replace("http", "json"), str(secret))
    assert send_and_wait(Notify(urls=urls, cluster="c1"), EVENT) == [("2 in urls", "")]

    assert sorted(request["path"].strip("/") for request in listener.received) == ["", "second"]
    for request in listener.received:
        document = json.loads(request["body"])
        assert document["title"] == "slurm-health: c1: n3: needs an administrator"
        assert document["message"] == "GPU 3 is lost\nreset at 5: failed"


@needs_apprise
@rows
def test_urls_that_cannot_be_used_are_named_without_the_url(
    tmp_path: Path, urls: str, mode: int, why: str
) -> None:
    file = tmp_path / "urls"
    file.write_text(urls)
    file.chmod(mode)
    ((_, problem),) = send_and_wait(Notify(urls=(str(file),)), EVENT)
    assert why in problem
    assert urls not in problem


@needs_apprise
def test_a_service_that_does_not_answer_ends_at_the_limit() -> None:
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); kept = [s.accept() for _ in range(99)]"
    )
    silent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert silent.stdout is not None
        settings = Notify(urls=(f"json://127.0.0.1:{silent.stdout.readline().strip()}",), limit_s=2)
        began_s = time.monotonic()
        ((_, problem),) = send_and_wait(settings, EVENT)
        assert "within 2 s" in problem
        assert time.monotonic() - began_s < 30
    finally:
        silent.kill()
        silent.communicate()


def test_without_apprise_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "apprise.py").write_text("raise ImportError('none here')\n")
    code = (
        "from tests.node.test_notify import EVENT, Notify, send_and_wait\n"
        "print(send_and_wait(Notify(urls=('json://127.0.0.1:9',)), EVENT)[0][1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install 'slurm-health[notify]'" in done.stdout


def test_doctor_sends_a_test_event_as_the_site_has_set(node: Node) -> None:
    def says() -> tuple[int, str]:
        _ = node.site
        words = ["--config", str(node.directory / "etc/config.toml"), "--test-notify"]
        result = CliRunner().invoke(site_setup.doctor, words, standalone_mode=False)
        assert result.exception is None
        return result.return_value, result.output

    assert "nothing is sent" in says()[1]
    node.more = into_file(node)
    assert says() == (0, "sh: sent\n")
    (event,) = received(node)
    assert event.kind is EventKind.TEST

    node.more = "[notify]\ncommand = ['false']\n"
    assert says() == (1, "false: false exited with code 1\n")
