# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` without Slurm: real processes on this machine that play nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.supervised import eventually
from tests.support.unshared import played_python

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

COMMAND = str(Path(sys.executable).with_name("slurm-health"))
# torchrun waits 300 s for a node whose training failed: what that node said is worth the wait.
DEADLINE_S = 360
# A signal that arrives before torchrun has noted whom it started leaves that running.
WAITS = """\
import pathlib, time
time.sleep(2)
pathlib.Path('began').touch()
time.sleep(600)
"""


class Node:
    """One process of `slurm-health run`, started in `directory`.

    Its probes are played and torchrun's options read without torch, unless it is `real`; it also
    trains for real if it `trains`.
    """

    def __init__(
        self,
        directory: Path,
        *words: str,
        real: bool = False,
        trains: bool = False,
        **environ: str,
    ) -> None:
        python = [] if real else [f"--python={played_python(directory, trains=trains)}"]
        self.process = subprocess.Popen(
            [COMMAND, "run", *python, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={
                **os.environ,
                "SLURM_HEALTH_JOURNAL": str(directory / "journal"),
                "FAKE_WORKER_DIR": str(directory),
                "OMP_NUM_THREADS": "1",
                **environ,
            },
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: code, standard output, standard error; kill it where none comes."""
        try:
            stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
        return self.process.returncode, stdout, stderr


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.heavy
@pytest.mark.parametrize("monitor", ["report", "off"])
def test_the_process_ends_as_its_torchrun_does(tmp_path: Path, monitor: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    node = Node(tmp_path, f"--monitor={monitor}", "--standalone", str(script), trains=True)
    eventually((tmp_path / "began").exists, "the script began")
    node.process.send_signal(signal.SIGTERM)
    code, _, stderr = node.end()
    assert code == 128 + signal.SIGTERM
    assert "closing signal SIGTERM" in stderr
    assert "Traceback" not in stderr


@pytest.mark.heavy
def test_ctrl_c_while_it_trains_shows_none_of_our_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    node = Node(tmp_path, "--standalone", str(script), trains=True)
    eventually((tmp_path / "began").exists, "the script began")

    node.process.send_signal(signal.SIGINT)

    code, _, stderr = node.end()
    assert code == 130, stderr
    assert "quiet_torchrun.py" not in stderr
    assert "SignalException" not in stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    "alone",
    [["--standalone"], *(pytest.param(w, marks=pytest.mark.slow) for w in (["--nnodes=1"], []))],
)
def test_one_machine_that_is_not_checked_says_why_its_training_failed(
    tmp_path: Path, alone: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise KeyError('lr')\n")
    code, _, stderr = Node(tmp_path, *alone, str(script), trains=True).end()

    assert code == 1
    assert stderr.count("post-mortem: why") == 1, stderr
    assert "KeyError: 'lr'" in stderr


def test_nodes_that_know_no_ranks_say_that_nothing_watches_them(
    tmp_path: Path, free_port: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    words = [
        "--nnodes=2",
        "--monitor=stop",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port}",
    ]
    ends = [each.end() for each in [Node(tmp_path, *words, str(script)) for _ in range(2)]]

    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all("this training is not watched: " in stderr for _, _, stderr in ends)
