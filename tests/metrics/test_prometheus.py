# SPDX-License-Identifier: Apache-2.0
"""What Prometheus makes of the metrics: its checker, a node_exporter, a server, a dashboard."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.system import templates
from tests.cli.test_history import LONG_AGO, write_lemon
from tests.support.command_line import Done, slurm_health
from tests.support.hooked_node import Node

DEADLINE_S = 90.0
NEEDED = ("promtool", "prometheus", "prometheus-node-exporter")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"no {', '.join(MISSING)} here: apt-get install prometheus prometheus-node-exporter",
)


@pytest.fixture
def textfiles(node: Node, tmp_path: Path) -> Path:
    """A collector's directory with both files: of a node with a fault, and of a fleet's history."""
    directory = tmp_path / "textfile"
    directory.mkdir()
    node.more = f'[metrics]\ndirectory = "{directory}"\n'
    node.break_it()
    node.healthcheck()
    write_lemon(tmp_path / "journal")
    done = metrics(tmp_path, LONG_AGO, f"--output={directory}/slurm_health_history.prom")
    assert done.code == 0, done
    return directory


def metrics(tmp_path: Path, *words: str) -> Done:
    environ = {
        "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return slurm_health("lemons", "--prometheus", *words, environ=environ)


def test_promtool_finds_no_fault_in_them(textfiles: Path) -> None:
    for path in sorted(textfiles.glob("*.prom")):
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=path.read_bytes(),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b""), path
    assert len(list(textfiles.iterdir())) == 2


def test_a_prometheus_answers_every_question_of_the_dashboard(
    textfiles: Path, tmp_path: Path
) -> None:
    with prometheus(textfiles, tmp_path) as ask:
        await_value(lambda: ask("slurm_health_node_fault"), [1.0])
        await_value(lambda: ask('slurm_health_node_standing{standing="lemon",node="n3"}'), [1.0])
        assert ask("node_textfile_scrape_error") == [0.0]
        for title, query in questions():
            assert ask(query), (title, query)


def questions() -> list[tuple[str, str]]:
    """Return every query of the dashboard, as Grafana would send it with all checks chosen."""
    dashboard = json.loads(templates.shipped("grafana").joinpath("slurm-health.json").read_text())
    return [
        (panel["title"], target["expr"].replace("$check", ".*"))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def await_value(ask: Callable[[], list[float]], wanted: list[float]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    found: list[float] = []
    while time.monotonic() < until_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            found = ask()
            if found == wanted:
                return
        time.sleep(0.2)
    assert found == wanted


@contextlib.contextmanager
def prometheus(textfiles: Path, tmp_path: Path) -> Iterator[Callable[[str], list[float]]]:
    """Run a node_exporter and a Prometheus that scrapes it; yield how that is asked."""
    exporter, server = free_port(), free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: node, static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]}}\n"
    )
    commands = [
        [
            "prometheus-node-exporter",
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={textfiles}",
            f"--web.listen-address=127.0.0.1:{exporter}",
        ],
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{server}",
        ],
    ]

    def ask(query: str) -> list[float]:
        words = urllib.parse.urlencode({"query": query})
        address = f"http://127.0.0.1:{server}/api/v1/query?{words}"
        with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
            document: dict[str, Any] = json.load(answer)
        assert document["status"] == "success", document
        return [float(each["value"][1]) for each in document["data"]["result"]]

    with running(commands, tmp_path / "prometheus.log"):
        yield ask


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]], log: Path) -> Iterator[None]:
    """Run programs until the test is over."""
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        for words in commands:
            process = stack.enter_context(
                subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
        yield


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
