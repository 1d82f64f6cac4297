# SPDX-License-Identifier: Apache-2.0
"""`health.json`: what launchers read of a node's last health check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_scontrol import FakeScontrol
from tests.support.hooked_node import Node

pytestmark = pytest.mark.root

NOBODY = 65534
# As docs/admin/install.md shows it.
READER = (
    "import json, sys, time\n"
    "health = json.load(open(sys.argv[1]))\n"
    "print(health['status'] if time.time() < health['valid_until'] else 'unknown')"
)


def health(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.site.state / "health.json").read_bytes())
    return found


def test_a_health_check_replaces_what_the_last_one_found(node: Node) -> None:
    node.healthcheck()
    assert health(node) == {
        "node": "n3",
        "status": "healthy",
        "faults": [],
        "checked_at": 1_000_000,
        "valid_until": 1_000_900,
    }
    node.now_s += 300
    node.break_it()
    node.healthcheck()
    found = health(node)
    assert (found["status"], found["faults"]) == ("faulty", ["scratch: /broken exists"])
    assert (found["checked_at"], found["valid_until"]) == (1_000_300, 1_001_200)


def test_a_node_on_which_a_check_could_not_measure_is_unknown(node: Node) -> None:
    node.more = "[checks.gone]\ncheck='command'\nargv=['/nowhere']\n"
    node.healthcheck()
    assert (health(node)["status"], health(node)["faults"]) == ("unknown", [])


def test_a_fault_in_shadow_mode_is_none(node: Node) -> None:
    node.more = "[checks.bad]\ncheck='cpus'\nmin_online=100000\nshadow=true\n"
    node.healthcheck()
    assert health(node)["status"] == "healthy"


@pytest.mark.parametrize("later_s", [0, 901])
def test_an_ordinary_user_reads_it_and_takes_an_expired_one_as_unknown(
    public_path: Path, slurm: FakeScontrol, shared: Path, later_s: int
) -> None:
    node = Node(public_path, "n3", slurm, shared)
    node.now_s = time.time() - later_s
    umask = os.umask(0o077)
    try:
        node.healthcheck()
    finally:
        os.umask(umask)
    node.directory.chmod(0o755)

    def as_nobody(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, user=NOBODY, capture_output=True, text=True, check=False)

    path = node.site.state / "health.json"
    assert path.stat().st_mode & 0o7777 == 0o644
    done = as_nobody(sys.executable, "-c", READER, str(path))
    assert done.stdout.strip() == ("unknown" if later_s else "healthy"), done.stderr
    # Nothing else there is open to others: who may open the lock could hold it.
    assert as_nobody("ls", str(node.site.state)).returncode != 0
    others = [each for each in node.site.state.rglob("*") if each != path]
    assert others
    assert [each for each in others if each.stat().st_mode & 0o077] == []


def test_a_reader_meanwhile_sees_one_that_is_whole(node: Node) -> None:
    node.healthcheck()
    path, ended, broken = node.site.state / "health.json", threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            try:
                json.loads(path.read_bytes())
            except (OSError, ValueError) as err:
                broken.append(err)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(5):
        node.healthcheck()
    ended.set()
    reader.join()
    assert broken == []


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_cannot_be_written_changes_no_answer(node: Node, is_broken: bool) -> None:
    node.healthcheck()
    path = node.site.state / "health.json"
    path.unlink()
    (path / "in-the-way").mkdir(parents=True)
    if is_broken:
        node.break_it()
    assert node.healthcheck() is is_broken
    assert (path / "in-the-way").is_dir()
