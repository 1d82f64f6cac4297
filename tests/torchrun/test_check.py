# SPDX-License-Identifier: Apache-2.0
"""The check of a training's nodes as its processes see it: earlier checks, and the secret."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.records.errors import ConfigError, ExitCode, JournalError
from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.check import KEY_VARIABLE, checked, read_secret, without_secret
from slurm_health.torchrun.earlier_check import EarlierCheck, find, measured_in
from slurm_health.torchrun.node_choice import Bounds
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import Start

NODES = ("n1", "n2")
STARTED = RunStarted(
    run_id="abc",
    job_id=7,
    attempt=0,
    cluster="lab",
    partition="main",
    nodes=["n1", "n2", "n3"],
    master_node="n1",
    user="alice",
    start_time_s=100,
    settings={"check": "values,matmul,rail_allgather,allgather", "act": True},
)
VERDICT = VerdictReached(
    nodes=[
        NodeVerdict(node="n1", level=Level.HEALTHY),
        NodeVerdict(node="n2", level=Level.FAULTY, reason="dead"),
        NodeVerdict(node="n3", level=Level.HEALTHY),
    ]
)
GOES_ON = JobOutcome(disposition=Disposition.PROCEED, exit_code=1)
WHOLE = (STARTED, VERDICT, GOES_ON)
PROBES = ("matmul", "rail_allgather", "allgather")
BY_RUN = msgspec.structs.replace(STARTED, settings={**STARTED.settings, "nnodes": "2"})


def place(node: str = "n1", **differing: object) -> TaskPlace:
    known: dict[str, object] = {
        "nodes": NODES, "node": node, "start": "7.0.1", "job_id": 7, "step": 1,
        "cluster": "lab", "start_time_s": 100,
    }  # fmt: skip
    return TaskPlace(**{**known, **differing})  # type: ignore[arg-type]


def lay(root: Path, *records: Record, label: str = "0") -> Path:
    directory = journal.job_directory(root, "lab", 7) / label
    journal.create(directory, [journal.MASTER])
    journal.Writer(directory, journal.MASTER, lambda: 50.0).append(*records)
    return directory


def own(root: Path) -> Path:
    return journal.job_directory(root, "lab", 7) / "0-3"


def found(root: Path, here: TaskPlace | None = None) -> EarlierCheck | None:
    return find(own(root), here or place(), PROBES)


def test_the_check_before_the_script_stands_for_that_of_its_training(tmp_path: Path) -> None:
    directory = lay(tmp_path, *WHOLE)
    assert found(tmp_path) == EarlierCheck(directory=directory, verdict=VERDICT, ended_s=50.0)


def test_the_directory_that_another_task_has_made_for_this_start_is_none(tmp_path: Path) -> None:
    lay(tmp_path, *WHOLE)
    journal.create(own(tmp_path), ["n2"])
    assert found(tmp_path) is not None


@pytest.mark.parametrize(
    "records",
    [
        (),
        (STARTED,),
        (STARTED, VERDICT),
        (BY_RUN, VERDICT, GOES_ON),
        (STARTED, VERDICT, JobOutcome(disposition=Disposition.REQUEUE, exit_code=1)),
        (STARTED, VERDICT, JobOutcome(disposition=Disposition.PROCEED, exit_code=4)),
        (STARTED, VerdictReached(nodes=VERDICT.nodes[1:]), GOES_ON),
        (msgspec.structs.replace(STARTED, settings={"check": "matmul"}), VERDICT, GOES_ON),
        (msgspec.structs.replace(STARTED, start_time_s=99), VERDICT, GOES_ON),
    ],
    ids=[
        "nothing", "begun", "judged", "before a training", "requeued", "not checked",
        "other nodes", "less measured", "an older job's",
    ],
)  # fmt: skip
def test_any_other_check_stands_for_none(tmp_path: Path, records: tuple[Record, ...]) -> None:
    lay(tmp_path, *records)
    assert found(tmp_path) is None


def test_a_check_of_another_attempt_or_before_an_earlier_training_stands_for_none(
    tmp_path: Path,
) -> None:
    assert found(tmp_path) is None
    lay(tmp_path, *WHOLE)
    assert found(tmp_path, place(attempt=1)) is None
    assert found(tmp_path, place(chosen_start=True)) is None
    lay(tmp_path, BY_RUN, VERDICT, GOES_ON, label="0-2")
    assert found(tmp_path) is None


SECRET = b"correct horse battery staple"


def taken_part(root: Path, node: str, least: int = 1) -> Start | int:
    """Take part as this node in a check that an earlier one stands for."""
    words: dict[str, str | int | bool] = {"network-check": True, "journal": str(root)}
    arguments = Arguments(options=[], program=["train.py"], given={}, own=words)
    return checked(place(node), Bounds(least=least, most=2), arguments, "python3", {})


def test_all_tasks_know_whom_the_earlier_verdict_lets_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = lay(tmp_path, *WHOLE)

    led = taken_part(tmp_path, "n1")

    assert isinstance(led, Start)
    assert led.nodes == ("n1",)
    assert led.left_out == {"n2": "faulty, dead"}
    assert "ago: n2 faulty" in capsys.readouterr().err
    assert taken_part(tmp_path, "n2") == ExitCode.HEALTHY
    assert "n2 is LEFT OUT: faulty, dead; training goes on" in capsys.readouterr().err
    assert measured_in(own(tmp_path)) == directory
    assert measured_in(directory) == directory


def test_with_too_few_nodes_left_all_tasks_end_and_the_first_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(tmp_path, *WHOLE)
    assert [taken_part(tmp_path, node, 2) for node in ("n1", "n2")] == [ExitCode.BAD_NODES] * 2
    assert capsys.readouterr().err.count("training does NOT start: n2 is faulty: dead") == 1


def test_a_start_is_made_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay(tmp_path, *WHOLE)
    taken_part(tmp_path, "n1")
    with pytest.raises(JournalError, match="earlier start"):
        taken_part(tmp_path, "n1")
    # Where all nodes are needed, they train unchecked.
    assert taken_part(tmp_path, "n1", 2) == Start(nodes=("n1", "n2"))
    assert "n1: UNCHECKED: journal" in capsys.readouterr().err


def test_a_secret_comes_from_a_file_or_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    environ = {KEY_VARIABLE: "another one that is long enough"}
    assert read_secret(str(file), environ) == SECRET
    assert read_secret(None, environ) == b"another one that is long enough"
    assert read_secret(None, {}) == b""
    assert without_secret({**environ, "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "short", " " * 40])
def test_what_is_too_short_to_be_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        read_secret(None, {KEY_VARIABLE: text})


@pytest.mark.parametrize(
    ("mode", "match"), [(None, "No such file"), (0o644, "chmod 600"), (0o620, "chmod 600")]
)
def test_a_secret_file_that_others_may_use_or_nobody_can_is_refused(
    tmp_path: Path, mode: int | None, match: str
) -> None:
    file = tmp_path / "secret"
    if mode is not None:
        file.write_bytes(SECRET)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=match):
        read_secret(str(file), {})
