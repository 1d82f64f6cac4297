# SPDX-License-Identifier: Apache-2.0
"""The lab keeps what it promises: life, isolation, commands."""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.supervised import eventually

from . import Lab
from .cgroups import find_cpu_controller
from .layout import BASE, CHECKOUT
from .processes import namespace

pytestmark = pytest.mark.lab


def fresh_name() -> str:
    return f"test-{secrets.token_hex(3)}"


def cli(*argv: str, stdin: str = "", cwd: Path = CHECKOUT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.lab", *argv],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def traces(name: str) -> list[str]:
    """Files, cgroups and mounts that belong to this lab."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    controller = find_cpu_controller()
    places = [BASE / name]
    if controller is not None:
        places.append(controller.mount / "slurm-health-lab" / name)
    return found + [str(place) for place in places if place.exists()]


def processes_in(namespaces: set[str | None]) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in pids
        if {namespace(pid, "pid"), namespace(pid, "net")} & (namespaces - {None})
    ]


def namespaces_of(lab: Lab) -> set[str | None]:
    places = [None, *lab.nodes]
    return {namespace(lab.pid(place), kind) for place in places for kind in ("pid", "net")}


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


# -- life -------------------------------------------------------------------------------------


def test_up_and_down_leave_no_trace() -> None:
    name, before = fresh_name(), interfaces()
    up = cli("up", "--name", name, "--nodes", "2")
    assert (up.returncode, up.stderr) == (0, "")
    lab = Lab.attach(name)
    namespaces = namespaces_of(lab)
    assert len(namespaces) == 4
    assert processes_in(namespaces)
    assert interfaces() == before
    assert name in cli("list").stdout.split()
    assert cli("up", "--name", name).returncode == 1

    assert cli("down", "--name", name).returncode == 0
    assert traces(name) == []
    assert processes_in(namespaces) == []
    assert interfaces() == before


STARTER = """
import signal, sys
from tests.lab import Lab
lab = Lab.start(nodes=1, name=sys.argv[1])
print(lab.spec.name, flush=True)
signal.pause()
"""


def start_elsewhere(name: str) -> "subprocess.Popen[str]":
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, name], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == f"{name}\n"
    starter.stdout.close()
    return starter


def test_lab_ends_with_the_process_that_started_it() -> None:
    name = fresh_name()
    starter = start_elsewhere(name)
    namespaces = namespaces_of(Lab.attach(name))
    starter.kill()
    starter.wait()
    eventually(lambda: not processes_in(namespaces), "the end of the lab with its starter")
    eventually(lambda: not traces(name), "a lab without traces")
    with Lab.start(nodes=1, name=name) as lab:
        assert lab.ping()


def test_what_a_killed_lab_left_is_swept_by_the_next() -> None:
    name = fresh_name()
    starter = start_elsewhere(name)
    lab = Lab.attach(name)
    namespaces = namespaces_of(lab)
    keeper = json.loads(lab.paths.state.read_text())["keeper"]
    # Not afterwards: the next lab may be that of a test beside this one.
    assert traces(name)
    os.kill(keeper, signal.SIGKILL)  # it cannot clean up, and its lab must not outlive it
    eventually(lambda: not processes_in(namespaces), "the end of the lab with its keeper")
    starter.kill()
    starter.wait()
    with Lab.start(nodes=1):
        assert not traces(name)


def test_closed_checkout_is_open_to_jobs(tmp_path: Path) -> None:
    checkout = tmp_path / "closed" / "checkout"
    for package in ("lab", "played_gpu"):
        shutil.copytree(
            CHECKOUT / "tests" / package,
            checkout / "tests" / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (checkout / "tests" / "__init__.py").write_text("")
    (checkout / "slurm_health").mkdir()
    (checkout / "slurm_health" / "__init__.py").write_text("")
    for directory in (checkout, checkout.parent):
        directory.chmod(0o700)
    name = fresh_name()
    assert cli("up", "--name", name, "--nodes", "1", cwd=checkout).stderr == ""
    try:
        lab = Lab.attach(name)
        found = lab.run(
            [sys.executable, "-c", "import slurm_health as s; print(s.__file__)"],
            user="alice",
            node="n1",
            env={"PYTHONPATH": str(checkout)},
        )
        assert found.stdout.strip() == str(checkout / "slurm_health" / "__init__.py")
    finally:
        cli("down", "--name", name)
    assert checkout.parent.stat().st_mode & 0o777 == 0o700


# -- a lab in use -----------------------------------------------------------------------------


def test_exec_passes_streams_and_exit_code(lab: Lab) -> None:
    name = lab.spec.name
    inner = ["sh", "-c", "cat; hostname; pwd; env; echo oops >&2; exit 7"]
    options = ["--node", "n2", "--user", "bob", "--cwd", "/", "--env", "A=b c"]
    done = cli("exec", "--name", name, *options, "--", *inner, stdin="in\n")
    assert (done.returncode, done.stderr) == (7, "oops\n")
    lines = done.stdout.splitlines()
    assert lines[:3] == ["in", "n2", "/"]
    names = {line.partition("=")[0] for line in lines[3:]}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        "A",
        "HOME",
        "LANG",
        "LOGNAME",
        "PATH",
        "USER",
    }
    assert "A=b c" in lines


def test_signals_reach_the_command(lab: Lab) -> None:
    trap = "trap 'echo caught; exit 5' TERM; echo on; while :; do sleep 0.05; done"
    process = lab.popen(["sh", "-c", trap], node="n1", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    process.terminate()
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (5, b"caught\n")


PAGE = (CHECKOUT / "tests/lab/README.md").read_text()


@pytest.mark.parametrize("words", re.findall(r"^\| `([a-z-]+ n3[^`]*)`", PAGE, re.M))
def test_a_fault_that_the_page_lists_is_a_command(words: str) -> None:
    done = cli("fault", *words.split(), "--name", "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no lab named 'nowhere' is running" in done.stderr
