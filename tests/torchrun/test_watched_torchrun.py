# SPDX-License-Identifier: Apache-2.0
"""The torchrun that has something beside its workers trains whatever becomes of that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_health.torchrun.in_job import nodes
from tests.support.unshared import free_port

TORCHRUN = Path(nodes.__file__).with_name("watched_torchrun.py")
TOLD = {"command": ["false"], "node": "n1", "leads": True, "context": {}}
PLAIN = """\
import os, sys
if __name__ == "__main__":
    print("plain", sys.argv[1:])
"""
ARGUED = """
from types import SimpleNamespace
def parse_args(argv): return SimpleNamespace(nproc_per_node="1", max_restarts=0)
"""
SIZED = ARGUED + "def determine_local_world_size(nproc): return int(nproc)\n"


def run(told: str, words: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it by itself, with what it is told."""
    with tempfile.TemporaryFile() as file:
        file.write(told.encode())
        file.seek(0)
        return subprocess.run(
            [sys.executable, str(TORCHRUN), str(file.fileno()), *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            pass_fds=(file.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )


def torch_with(root: Path, *, run: str, registry: str | None) -> str:
    """Write a torch that has its torchrun, and its rendezvous or none; return its directory."""
    files = {
        "__init__.py": "",
        "distributed/__init__.py": "class DistNetworkError(Exception): ...\n",
        "distributed/run.py": run,
    }
    if registry is not None:
        elastic = "distributed/elastic"
        files |= {
            f"{elastic}/__init__.py": "",
            f"{elastic}/multiprocessing/__init__.py": "",
            f"{elastic}/multiprocessing/errors.py": "class ChildFailedError(Exception): ...\n",
            f"{elastic}/multiprocessing/api.py": "class SignalException(Exception): ...\n",
            f"{elastic}/rendezvous/__init__.py": ("class RendezvousParameters: ...\n"),
            f"{elastic}/rendezvous/registry.py": registry,
        }
    for name, text in files.items():
        path = root / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("has", "registry"),
    [
        (PLAIN, None),
        (PLAIN, "get_rendezvous_handler = print\n"),
        (PLAIN + ARGUED, "get_rendezvous_handler = print\n"),
        (PLAIN + SIZED, ""),
    ],
    ids=["no elastic", "no parser", "no size", "no registry"],
)
def test_a_torch_of_other_names_is_run_as_it_is(
    tmp_path: Path, has: str, registry: str | None
) -> None:
    where = torch_with(tmp_path, run=has, registry=registry)
    done = run(json.dumps(TOLD), ["--nnodes=2", "train.py", "a b"], PYTHONPATH=where)

    assert done.stdout == "plain ['--nnodes=2', 'train.py', 'a b']\n", done.stderr
    assert done.stderr.startswith("slurm-health: this training is not monitored: ")


@pytest.mark.parametrize("told", ["", "{}", json.dumps({**TOLD, "unknown": 1})])
def test_one_that_does_not_know_what_it_is_told_trains(tmp_path: Path, told: str) -> None:
    where = torch_with(tmp_path, run=PLAIN + SIZED, registry="get_rendezvous_handler = print\n")

    assert run(told, ["train.py"], PYTHONPATH=where).stdout.startswith("plain ['train.py']")


@pytest.fixture
def training(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import sys, time; time.sleep(2); print('trained', file=sys.stderr)\n")
    return path


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["c10d", "static"])
@pytest.mark.parametrize(
    "monitor",
    [
        ["/nowhere/monitor"],
        [sys.executable, "-c", "raise SystemExit('no devices')"],
        [sys.executable, "-c", "print('no hang'); raise SystemExit(75)"],
    ],
    ids=["missing", "failing", "raving"],
)
def test_a_broken_monitor_leaves_the_training_alone(
    training: Path, backend: str, monitor: list[str]
) -> None:
    words = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    words += ["--nnodes=1", "--node-rank=0", "--max-restarts=1"]
    done = run(json.dumps({**TOLD, "monitor": monitor}), [*words, str(training)])

    assert (done.returncode, done.stderr.count("trained\n")) == (0, 1), done.stderr


SAYS_HOW = "import sys; print('monitor', sys.argv[1:], file=sys.stderr, flush=True)"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["report", "stop", "restart"])
def test_with_the_static_rendezvous_a_hang_is_only_reported_and_that_is_said(
    training: Path, mode: str
) -> None:
    monitor = [sys.executable, "-c", SAYS_HOW, f"--on-hang={mode}"]
    told = {**TOLD, "monitor": monitor, "node_agent": ["true"]}
    words = ["--rdzv-backend=static", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    done = run(json.dumps(told), [*words, "--nnodes=1", "--node-rank=0", str(training)])

    assert done.returncode == 0, done.stderr
    (how,) = re.findall(r"monitor \[.*\]", done.stderr)
    assert "'--node=n1', '--nodes=n1'" in how
    assert ("'--on-hang=report'" in how.partition(",")[2]) == (mode != "report")
    said = f"the static rendezvous has no --monitor={mode}: a hang is only reported"
    assert (said in done.stderr) == (mode != "report")


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_failure_that_nobody_explains_ends_as_torchrun_ends_it(training: Path) -> None:
    training.write_text("raise KeyError('lr')\n")
    words = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nnodes=1"]
    done = run(json.dumps(TOLD), [*words, str(training)])

    assert done.returncode == 1
    assert "KeyError: 'lr'" in done.stderr
    assert "ChildFailedError" in done.stderr
    assert "During handling" not in done.stderr
