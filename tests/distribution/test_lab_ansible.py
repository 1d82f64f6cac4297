# SPDX-License-Identifier: Apache-2.0
"""The Ansible role on twenty nodes of the lab, by a real ansible-playbook.

Five are given wheels; on the others slurm-health is there already, as from a package. To make an
environment on each of twenty would take two cores longer than all that is looked at here.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.distribution import installations
from tests.lab import Lab
from tests.lab.inside import ask_argv
from tests.support.supervised import write_executable

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(3600)]

ROLE = Path(__file__).parents[2] / "distribution/ansible"
NODES = 20
BY_WHEEL = ("n1", "n3", "n7", "n19", "n20")
INTERPRETER = {"ansible_python_interpreter": "/usr/bin/python3", "ansible_become": False}
# Each node of the lab has a /tmp of its own; all else is the machine's.
HOME, ETC, STATE = "/tmp/health/home", "/tmp/health/etc", "/tmp/health/state"
PLAYBOOK = shutil.which(
    "ansible-playbook", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
)
# Ansible's closing lines: n1 : ok=9 changed=3 unreachable=0 ...
_RECAP = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+)", re.M)
SITE = (Path(__file__).parents[1] / "data" / "ansible" / "config.toml").read_text()


@dataclass
class Cluster:
    """Twenty nodes, and what Ansible is told of them."""

    lab: Lab
    directory: Path
    package: installations.Installation
    settings: dict[str, Any] = field(default_factory=dict)

    def play(self, playbook: str, *options: str, hosts: Sequence[str] = ()) -> set[str]:
        """Run a playbook of the tree, on some hosts or all; return those that it changed."""
        inventory = self.directory / "inventory.json"
        inventory.write_text(json.dumps(self._inventory()))
        environ = {
            **os.environ,
            "ANSIBLE_SSH_ARGS": "",
            "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_FORKS": "4",
            "ANSIBLE_HOME": str(self.directory / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
        }
        limit = [f"--limit={','.join(hosts)}"] if hosts else []
        words = [str(PLAYBOOK), "-i", str(inventory), str(ROLE / playbook), *limit, *options]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        found = dict(_RECAP.findall(done.stdout))
        assert len(found) == (len(hosts) or NODES + 1), done.stdout
        return {host for host, changed in found.items() if changed != "0"}

    def _inventory(self) -> dict[str, Any]:
        def host(node: str | None) -> dict[str, Any]:
            way_in = {"ansible_ssh_executable": str(self._way_in(node))}
            return way_in if node in BY_WHEEL else way_in | by_package

        home = str(self.package.command.parents[1])
        by_package: dict[str, Any] = {"slurm_health_wheels": [], "slurm_health_home": home}

        return {
            "slurm_health_nodes": {"hosts": {node: host(node) for node in self.lab.nodes}},
            "slurm_health_controller": {"hosts": {"ctl": host(None)}},
            "all": {"vars": {**INTERPRETER, **self.settings}},
        }

    def _way_in(self, node: str | None) -> Path:
        """Return what runs the last of its arguments on a node, as ssh does.

        Some 1,000 commands are run: none of them starts an interpreter for it.
        """
        argv = ask_argv(["/bin/sh", "-c"], pid=self.lab.pid(node))
        text = f'#!/bin/sh\nfor command; do :; done\nexec {shlex.join(argv)} "$command"\n'
        return write_executable(self.directory / f"ssh-{node}", text)

    def on(self, node: str, *argv: str) -> str:
        return self.lab.run(list(argv), node=node, check=False).stdout

    def settled(self, name: str) -> str:
        lines = self.lab.run(["scontrol", "show", "config"]).stdout.splitlines()
        return next(line.partition("=")[2].strip() for line in lines if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if PLAYBOOK is None:
        pytest.skip("ansible-playbook is not installed")
    directory = tmp_path_factory.mktemp("ansible")
    directory.chmod(0o755)
    shared = directory / "shared"
    shared.mkdir(mode=0o755)
    (directory / "config.toml").write_text(SITE.format(state=STATE, shared=shared))
    wheel = installations.wheel(directory)
    package = installations.Installation(directory / "package")
    package.install(wheel)
    wheels = [str(wheel), str(borrowing(directory))]
    settings = {
        "slurm_health_home": HOME,
        "slurm_health_etc": ETC,
        "slurm_health_kept": [STATE, "/tmp/health"],
        "slurm_health_python": "/usr/bin/python3",
        "slurm_health_wheels": wheels,
        "slurm_health_pip_arguments": ["--no-index", "--no-deps", "--no-compile"],
        "slurm_health_config": str(directory / "config.toml"),
        "slurm_health_edits_slurm_conf": True,
    }
    with Lab.start(nodes=NODES, visible=[directory], deadline_s=300) as lab:
        settings["slurm_health_slurm_conf"] = str(lab.paths.etc / "slurm/slurm.conf")
        yield Cluster(lab, directory, package, settings)


def borrowing(directory: Path) -> Path:
    """Make a wheel that takes all else from the environment of the tests: nothing is downloaded."""
    wheel = directory / "borrowed-1-py3-none-any.whl"
    about = "borrowed-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("borrowed.pth", sysconfig.get_path("purelib") + "\n")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: borrowed\nVersion: 1\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return wheel


def test_from_nothing_to_an_armed_check_and_back_to_nothing(cluster: Cluster) -> None:
    everywhere = {*cluster.lab.nodes, "ctl"}
    few = ["n1", "n3", "n7", "n20", "ctl"]

    # What would be done is told, and nothing is.
    assert cluster.play("install.yml", "--check", hosts=few) == {*few}
    assert not cluster.on("n7", "ls", "/tmp/health")
    assert cluster.settled("Prolog") == "(null)"

    assert cluster.play("install.yml") == everywhere
    assert cluster.settled("Prolog") == f"{ETC}/prolog/slurm-health"
    assert cluster.settled("PrologFlags") == "Alloc,DeferBatch"
    assert "batch_sched_delay=0" in cluster.settled("SchedulerParameters")  # the site's own
    assert "nohold_on_prolog_fail" in cluster.settled("SchedulerParameters")

    assert cluster.play("install.yml") == set()

    # In shadow, jobs run, and a broken node is not drained.
    cluster.on("n3", "touch", "/tmp/broken")
    health_check(cluster, "n3")
    assert drained(cluster) == set()
    assert cluster.lab.run(["srun", f"-N{NODES}", "true"], user="alice").stdout == ""

    # One check is armed, on the nodes alone, and drains the one that is broken.
    cluster.settings |= {"slurm_health_armed": ["flag"], "slurm_health_drain": True}
    assert cluster.play("install.yml") == everywhere - {"ctl"}
    await_drained(cluster, "n3")
    text = cluster.on("n3", "cat", f"{ETC}/config.toml")
    assert text.count("shadow = true") == 1
    assert "drain = true" in text

    # A wheel of the same version that was built anew is another wheel, and begins on a few nodes.
    wheel = Path(cluster.settings["slurm_health_wheels"][0])
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("slurm_health/newer.txt", "newer")
    assert cluster.play("install.yml", hosts=few) == {*few} - {"ctl"}
    assert newer(cluster, "n20")
    assert not newer(cluster, "n19")
    assert cluster.play("install.yml", hosts=few) == set()

    # Nothing is left, and jobs go on.
    cluster.on("n3", "rm", "/tmp/broken")
    cluster.lab.run([f"{HOME}/bin/slurm-health", "nodes", "--config", f"{ETC}/config.toml",
                     "release", "n3"], node="n3")  # fmt: skip
    assert cluster.play("uninstall.yml") == everywhere
    assert cluster.settled("Prolog") == "(null)"
    assert {cluster.on(node, "ls", "/tmp/health") for node in cluster.lab.nodes} == {""}
    assert cluster.package.command.is_file()  # whoever installed a package removes it
    conf = Path(cluster.settings["slurm_health_slurm_conf"]).read_text()
    assert "BEGIN slurm-health" not in conf
    assert cluster.play("uninstall.yml", hosts=few) == set()
    assert cluster.lab.run(["srun", f"-N{NODES}", "true"], user="alice").stdout == ""


def newer(cluster: Cluster, node: str) -> str:
    return cluster.on(node, "sh", "-c", f"find {HOME} -name newer.txt").strip()


def health_check(cluster: Cluster, node: str) -> None:
    command = [f"{ETC}/prolog/slurm-health-healthcheck"]
    cluster.lab.run(command, node=node, env={"SLURMD_NODENAME": node})


def await_drained(cluster: Cluster, node: str) -> None:
    """Let a node check itself until it is drained: slurmd may have begun a check of its own."""

    def checked() -> set[str]:
        health_check(cluster, node)
        return drained(cluster)

    cluster.lab.wait_until(checked, lambda found: found == {node}, f"{node} drained", 300)


def drained(cluster: Cluster) -> set[str]:
    found = cluster.lab.run(["sinfo", "-hN", "-t", "drain", "-o", "%N"]).stdout
    return set(found.split())
