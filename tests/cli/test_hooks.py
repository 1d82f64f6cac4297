# SPDX-License-Identifier: Apache-2.0
"""The administrator's commands: what they print, what they end with, what they leave alone."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from slurm_health.cli import hooks, nodes
from slurm_health.node import marks
from slurm_health.node.rules.accusations import NodeMark
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm
from tests.support.rows import rows
from tests.support.sites import write_site
from tests.support.stranger import as_stranger

pytestmark = pytest.mark.usefixtures("on_n3")


def call(node: Node, *words: str) -> Result:
    _ = node.site
    command = {"healthcheck": hooks.healthcheck, "nodes": nodes.nodes}[words[0]]
    config = ["--config", str(node.directory / "etc/config.toml")]
    result = CliRunner().invoke(command, [*config, *words[1:]], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def test_explain_says_what_runs_here_and_why_the_rest_does_not(node: Node) -> None:
    node.more = (
        "[checks.elsewhere]\ncheck='memory'\nnodes=['gpu[01-16]']\n"
        "[checks.part]\ncheck='memory'\npartitions=['gpu']\n"
        "[checks.new]\ncheck='cpus'\nmin_online=4\nshadow=true\n"
        "[checks.local]\ncheck='filesystem'\npath='/'\nhang_is_fault=true\n"
        "[checks.alone]\ncheck='cpus'\nmin_online=4\nexclusive=true\n"
    )
    text = call(node, "healthcheck", "--explain").output
    assert "local: prolog, healthcheck, retest\n    at worst" in text
    assert "node_fault, 5 s, a hang is a fault; line" in text
    assert "at worst node_fault, 5 s, retested on an idle node only;" in text
    assert "drains at most 20 % of a partition" in text
    assert "elsewhere: not here (for nodes gpu[01-16], this is n3)" in text
    assert "part: not here (for partitions gpu, and there is no job here)" in text
    assert "in shadow: logged only" in text
    assert node.slurm.calls() == []


@rows
def test_a_person_who_looks_changes_nothing(node: Node, check: str, said: str) -> None:
    node.more = f"[checks.odd]\n{check}"
    result = call(node, "healthcheck")
    assert result.return_value == 1
    assert said in result.output
    assert "\x1b" not in result.output
    assert node.slurm.calls() == []


def test_what_cannot_be_measured_ends_with_3(tmp_path: Path) -> None:
    text = f"[hooks]\nstate='{tmp_path}/state'\n[checks.gone]\ncheck='command'\nargv=['/nowhere']\n"
    config = ["--config", str(write_site(tmp_path / "etc", text))]
    ran = CliRunner().invoke(hooks.healthcheck, config, standalone_mode=False)
    assert ran.return_value == 3


@pytest.mark.heavy
def test_when_each_node_was_last_checked_and_how_that_ended_is_told(rack: list[Node]) -> None:
    for each in rack[:3]:
        each.now_s = time.time()
    rack[0].healthcheck()
    rack[1].now_s -= 7300
    rack[1].healthcheck()
    rack[2].break_it()
    rack[2].healthcheck()
    text = call(rack[0], "nodes").output
    assert "n3      idle+drain  0 min  /broken exists  still faulty" in text
    assert "no health check within the hour: n10, n11, n12, n13, n14, ... (18 nodes)\n" in text
    told = json.loads(call(rack[0], "nodes", "--json").output)
    (found,) = told["drained"]
    assert (found["now"], len(told["silent"])) == ("still faulty", 18)
    for each in (rack[1], *rack[4:]):
        each.now_s = time.time()
        each.healthcheck()
    text = call(rack[0], "nodes").output
    assert "no health check within the hour: n4 (1 node)\n" in text


def test_a_node_that_is_released_although_it_is_bad_is_named(node: Node) -> None:
    node.now_s = time.time()
    node.more = "[checks.bad]\ncheck='command'\nargv=['false']\nfault_codes=[1]\n"
    assert node.healthcheck()
    text = call(node, "nodes", "release", "n3").output
    assert text.startswith("n3: released; drained again if its last check still holds")
    assert text.endswith("bad node_fault: false: exit code 1\n")
    assert node.state == "IDLE"
    assert node.healthcheck()
    assert node.state == "IDLE+DRAIN"


@pytest.mark.root
@rows
def test_a_sites_directory_that_is_closed_to_the_user_is_told_as_that(
    words: tuple[str, ...], named: bool, code: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "etc").mkdir(mode=0o700)
        config = place / "etc/config.toml"
        config.touch()
        environ = {**os.environ, "SLURM_HEALTH_CONFIG": str(config)}
        option = ["--config", str(config)] if named else []
        done = as_stranger(*words, *option, environ=environ)
    said = " ".join((done.stdout + done.stderr).split())
    assert f"{config} cannot be read: Permission denied" in said
    assert "Traceback" not in said
    assert done.returncode == code


def test_nodes_lists_ours_with_since_why_and_what_to_do(node: Node, slurm: HookedSlurm) -> None:
    node.break_it()
    node.healthcheck()
    slurm.set({"n5": ("DOWN", "ADMIN"), "n6": ("IDLE+DRAIN", "shealth:network job 3: x")})
    checked = node.shared / "checked"  # what a node has left that Slurm has no more is removed
    (checked / "n99.json").write_bytes((checked / "n3.json").read_bytes())
    text = call(node, "nodes").output
    assert [path.name for path in checked.iterdir()] == ["n3.json"]
    assert "n3" in text
    assert "/broken exists" in text
    assert "2026-01-02T03:04:05" in text
    assert "network job 3: x" in text
    assert "n5" not in text
    assert "slurm-health nodes release NODE" in text
    result = call(node, "nodes", "--json")
    found = json.loads(result.output)["drained"]
    assert [each["node"] for each in found] == ["n3", "n6"]
    assert result.return_value == 0


def test_release_gives_back_ours_and_leaves_others(node: Node, slurm: HookedSlurm) -> None:
    slurm.set(
        {
            "n5": ("IDLE+DRAIN", "ADMIN SHUTDOWN"),
            "n6": ("IDLE+DRAIN", "shealth:a x check=a job=1 t=1"),
        }
    )
    result = call(node, "nodes", "release", "n[5-7]", "n99")
    assert result.return_value == 1
    assert result.output.splitlines() == [
        "n5: not ours: ADMIN SHUTDOWN [root@2026-01-02T03:04:05]",
        "n6: released",
        "n7: not drained: IDLE",
        "n99: unknown to Slurm",
    ]
    assert slurm.nodes()["n5"] == ("IDLE+DRAIN", "ADMIN SHUTDOWN")
    assert slurm.nodes()["n6"] == ("IDLE", "")


def test_a_tripped_breaker_is_loud_until_it_is_reset(rack: list[Node]) -> None:
    for each in rack[:6]:
        each.break_it()
        each.healthcheck()
    text = call(rack[0], "nodes").output
    assert "THE BREAKER OF gpu HAS TRIPPED" in text
    (left,) = [line for line in text.splitlines() if line.startswith("faulty, but still in")]
    assert left.startswith("faulty, but still in the pool: n[5-6], "), left
    assert left.endswith(": scratch: /broken exists"), left
    result = call(rack[0], "nodes", "--json")
    assert result.return_value == 1
    found = json.loads(result.stdout)
    assert list(found["tripped"]) == ["gpu"]
    assert "would be drained" in found["tripped"]["gpu"]["why"]
    assert [each["node"] for each in found["left_in_pool"]] == ["n5", "n6"]
    assert "reset" in call(rack[0], "nodes", "reset").output
    result = call(rack[0], "nodes")
    assert "TRIPPED" not in result.output
    assert result.return_value == 1  # two faulty nodes are still there
    for each in rack[4:6]:
        each.mend()
        each.healthcheck()
    assert call(rack[0], "nodes").return_value == 0


def test_a_damaged_ledger_is_told_and_a_reset_mends_it(node: Node) -> None:
    (node.shared / "ledger.1").write_text("{")
    node.break_it()
    assert not node.prolog()
    text = call(node, "nodes").output
    assert "NO NODE IS DRAINED" in text
    assert "is damaged" in text
    assert "slurm-health nodes reset" in text
    call(node, "nodes", "reset")
    assert "NO NODE" not in call(node, "nodes").output
    assert node.prolog()


def test_a_marked_node_is_listed_with_who_accuses_it_and_when(node: Node) -> None:
    for job, uid, ago_s in ((7, 0, 7200), (8, 4242424, 300)):
        mark = NodeMark(job=job, uid=uid, component="node", text="x", time_s=time.time() - ago_s)
        marks.add(node.site, "n3", mark)

    text = call(node, "nodes").output

    who = "job 7 of root 2 h ago, job 8 of 4242424 5 min ago"
    assert (
        f"marked: n3: accused by 2 jobs of 2 users, unconfirmed here; the last: x ({who})" in text
    )


def test_a_node_that_slurm_does_not_know_cannot_be_ignored(node: Node) -> None:
    with pytest.raises(click.UsageError, match="Slurm knows no node n99"):
        call(node, "nodes", "ignore", "n[3,99]", "--until", "2h")


@pytest.mark.parametrize("hook", ["prolog", "epilog", "healthcheck"])
def test_a_hook_on_a_well_node_loads_nothing_heavy(tmp_path: Path, hook: str) -> None:
    text = f"[hooks]\nstate='{tmp_path}/state'\n[checks.memory]\n[checks.gpu]\ncontexts=[]\n"
    config = write_site(tmp_path / "etc", text)
    code = (
        "import sys\n"
        "from slurm_health.node.hooks.__main__ import main\n"
        f"assert main([{hook!r}, {str(config)!r}]) == 0\n"
        "heavy = {'torch', 'numpy', 'click', 'filelock', 'subprocess', 'pynvml',"
        " 'tabulate', 'asyncio', 'logging', 'pyslurm', 'dataclasses', 'difflib', 'shutil',"
        " 'socket'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("when", ["2h", "now"])
def test_a_node_is_ignored_until_an_age_has_passed_or_now(node: Node, when: str) -> None:
    assert call(node, "nodes", "ignore", "n3", "--until", when).return_value == 0
    assert ("ignored" in call(node, "nodes").output) is (when != "now")
