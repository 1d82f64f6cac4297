# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` of one machine: what it prints, its exit code, and how it is interrupted."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.preflight.job_spec import JobSpec
from tests.support.command_line import COMMAND, finish, one_line, slurm_health, start
from tests.support.rows import rows
from tests.support.supervised import descendants, eventually

FAKE_WORKER = str(Path(__file__).parents[1] / "support" / "fake_worker.py")


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "workers"
    directory.mkdir()
    monkeypatch.setenv("FAKE_WORKER_DIR", str(directory))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return directory


def local(tmp_path: Path, *words: str) -> list[str]:
    return ["check", "--local=3", f"--python={FAKE_WORKER}", f"--journal={tmp_path}/j", *words]


@rows
def test_a_check_that_cannot_begin_says_what_to_do_instead(
    tmp_path: Path, words: tuple[str, ...], code: int, said: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    usual = (f"--python={FAKE_WORKER}", f"--journal={tmp_path}/j")
    done = slurm_health("check", *usual, *(word.format(tmp_path) for word in words))
    assert (done.code, done.stdout) == (code, "")
    line = one_line(done.stderr)
    assert all(text.format(tmp_path) in line for text in said)


def test_a_bad_node_is_exit_code_1_whoever_reads_the_output(tmp_path: Path, workers: Path) -> None:
    (workers / "local1").write_text("raises")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *local(tmp_path)],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_json_of_a_check_is_json_and_its_logs_go_elsewhere(tmp_path: Path, workers: Path) -> None:
    (workers / "local2").write_text("broken-torch")

    done = slurm_health(*local(tmp_path, "--json"))

    assert done.code == 3
    verdicts = {node["node"]: node["level"] for node in json.loads(done.stdout)["nodes"]}
    assert verdicts == {"local0": "healthy", "local1": "healthy", "local2": "inconclusive"}
    assert done.stderr != ""


def test_probes_run_with_the_exports_of_a_file(tmp_path: Path, workers: Path) -> None:
    """Only the file names the directory in which it stands how the probes are played."""
    played = tmp_path / "played"
    played.mkdir()
    (played / "local2").write_text("unreachable")
    (tmp_path / "click.py").write_text("raise SystemExit('the wrong click')\n")
    file = tmp_path / "env.sh"
    file.write_text(
        f"export FAKE_WORKER_DIR={played} GLOO_SOCKET_IFNAME=lo API_TOKEN=secret\n"
        f"export PYTHONPATH={tmp_path}; echo API_TOKEN=secret\n"
    )

    done = slurm_health(*local(tmp_path, "--json", f"--setup={file}"))

    nodes = {each["node"]: each for each in json.loads(done.stdout)["nodes"]}
    assert "connects over GLOO_SOCKET_IFNAME=lo" in nodes["local2"]["reason"]
    assert "the wrong click" not in done.stderr  # PYTHONPATH is for the probes' interpreter
    (master,) = tmp_path.glob("j/local/*/0/master.jsonl")
    assert json.loads(master.read_text().splitlines()[0])["settings"]["setup"] == str(file)
    written = "".join(path.read_text() for path in master.parent.glob("*.jsonl"))
    assert "secret" not in written + done.stdout + done.stderr


@rows
def test_a_check_localizes_as_the_site_wants(
    tmp_path: Path, workers: Path, site: str, check: str, rounds: int | None, level: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[localize]\n{site}\n" if site else "")
    words = local(tmp_path, "--local=2", f"--check={check}", "--json")

    found = json.loads(slurm_health(*words, environ={"SLURM_HEALTH_CONFIG": str(file)}).stdout)

    assert {node["level"] for node in found["nodes"]} == {level}
    assert rounds in (None, len(found["rounds"]))


@rows
def test_a_check_that_is_interrupted_leaves_no_process_behind(
    tmp_path: Path, workers: Path, number: int, words: str
) -> None:
    for node in ("local0", "local1", "local2"):
        (workers / node).write_text("deaf")
    process = start(*local(tmp_path))
    eventually(lambda: len(descendants(process.pid)) == 6, "three agents with their workers")
    below = descendants(process.pid)

    os.killpg(process.pid, number)

    done = finish(process)
    # By the signal itself where it came while a dataclass was made: Python remembers an interrupt
    # of exec(). A shell shows both as the same.
    assert done.code in (128 + number, -number)
    assert "Traceback" not in done.stderr
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")
    (job,) = (tmp_path / "j" / "local").iterdir()
    said = slurm_health("report", "--journal", str(tmp_path / "j"), job.name).stdout
    # Before the first round or in one: that depends on how soon all processes were seen.
    assert words in said


def test_a_signal_that_comes_when_a_check_has_ended_changes_nothing(tmp_path: Path) -> None:
    """As Slurm sends it to every process of a job that is requeued."""
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "from slurm_health.cli.main import main\n"
        f"sys.argv = ['slurm-health', 'check', '--journal={tmp_path}']\n"
        "main()\n"
    )

    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (4, "")
    one_line(done.stderr)


def test_a_check_ends_its_agents_despite_a_second_signal(tmp_path: Path, workers: Path) -> None:
    (workers / "local0").write_text("deaf")
    process = start("check", "--local=1", f"--python={FAKE_WORKER}", f"--journal={tmp_path}/j")
    eventually(lambda: len(descendants(process.pid)) == 2, "an agent with its worker")
    below = descendants(process.pid)

    process.send_signal(signal.SIGTERM)
    while process.poll() is None:  # all the time that it ends
        process.send_signal(signal.SIGTERM)

    done = finish(process)
    assert (done.code, "Exception" in done.stderr) == (128 + signal.SIGTERM, False)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")


def test_for_the_supervisor_everything_ends_in_one_line_of_json(tmp_path: Path) -> None:
    spec = JobSpec(journal=str(tmp_path)).encoded()
    done = slurm_health("supervised-check", "r", spec)

    answer: Mapping[str, object] = json.loads(one_line(done.stdout))
    assert answer["disposition"] == "proceed"
    assert answer["exit_code"] == done.code == 4
    assert str(answer["reason"]).startswith("UNCHECKED: SLURM_JOB_ID")
