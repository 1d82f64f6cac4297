# SPDX-License-Identifier: Apache-2.0
"""What is done when workers have failed, decided from what they wrote at last."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import (
    Diagnosed,
    FailurePlanned,
    TrainingEvent,
    TrainingPlanned,
    WorkersEnded,
)
from slurm_health.system import journal
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.process import TorchrunEnd
from slurm_health.torchrun.restarts import Failure, decide, for_restart
from tests.support.ended_jobs import hang_at
from tests.support.journals import run_started
from tests.support.rows import rows

WROTE = tomllib.loads((Path(__file__).parents[1] / "data/workers_ended.toml").read_text())
STARTED = run_started(["n1", "n2", "n3"], job_id=7)


def hang(cause: str, ranks: Sequence[int]) -> TrainingEvent:
    return hang_at(cause, "it hangs", ranks, [f"n{rank + 1}" for rank in ranks])


PLACE = TaskPlace(nodes=("n1", "n2", "n3"), node="n1", start="7.0.1", job_id=7)


def failure(root: Path, **differing: Any) -> Failure:
    """The first restart of a training that goes on with two nodes."""
    own = {"journal": str(root)} | differing.pop("own", {})
    given = {"max_restarts": str(differing.pop("most", 2))}
    arguments = Arguments(options=[], program=["train.py"], given=given, own=own)
    hang = differing.pop("hang", None)
    ended = TorchrunEnd(code=1, output="", ran_s=0.0, ended_s=0.0, hang=hang)
    known = {"directory": None, "restart": 1, "least": 2, "ended": ended}
    return Failure(place=PLACE, arguments=arguments, **{**known, **differing})


def decided(
    root: Path, texts: Sequence[str], *, silent: int = 0, **differing: Any
) -> TrainingPlanned:
    """Return what is decided when those from n1 on have written these texts, and no dump."""
    reports = [
        WorkersEnded(node=f"n{number}", exit_code=1, output=text.format(rank=number - 1))
        for number, text in enumerate(texts, 1)
    ]
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(root / "flight_")}
    return decide(failure(root, **differing), reports, silent, environ)


@rows
def test_what_workers_wrote_at_last_decides_what_follows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    texts: list[list[str]],
    options: dict[str, Any],
    expected: str,
    nodes: tuple[str, ...],
    text: str,
) -> None:
    wrote = [word and WROTE[word].replace("NODE", "".join(lost)) for word, *lost in texts]
    for name in options.keys() & {"hang"}:
        options[name] = hang(*options[name])
    options["hangs_before"] = [hang(*each) for each in options.get("hangs_before", ())]
    planned = decided(tmp_path, wrote, **options)
    assert (planned.plan, tuple(planned.nodes)) == (expected, nodes)
    said = capsys.readouterr().err
    assert text in said
    told = expected == "stop" and (options.get("most") != 0 or "hang" in options)
    assert ("the training ends" in said) == told


def test_what_was_found_and_decided_is_recorded(tmp_path: Path) -> None:
    journal.create(tmp_path, [journal.MASTER])
    decided(tmp_path, [WROTE[word] for word in ("broke", "killed", "broke")], directory=tmp_path)
    (cause,) = [entry.record for entry in journal.read_all(tmp_path, journal.POST_MORTEM)]
    (planned,) = [entry.record for entry in journal.read_all(tmp_path, journal.RESTART)]
    assert isinstance(cause, Diagnosed)
    assert (cause.cause, cause.nodes) == ("killed", ["n2"])
    assert isinstance(planned, FailurePlanned)
    assert (planned.plan, planned.restart, planned.max_restarts) == ("check", 1, 2)
    assert "SIGKILL" in planned.reason


@rows
def test_the_check_that_was_asked_for_precedes_a_restart_where_it_takes_no_minutes(
    tmp_path: Path, own: dict[str, str | int | bool], took_s: float | None, check: str
) -> None:
    arguments = Arguments(options=[], program=["train.py"], given={}, own=own)
    if took_s is not None:
        journal.create(tmp_path, [journal.MASTER])
        journal.Writer(tmp_path, journal.MASTER, lambda: 1.0).append(STARTED)
        verdict = VerdictReached(nodes=[])
        journal.Writer(tmp_path, journal.MASTER, lambda: 1.0 + took_s).append(verdict)

    assert for_restart(arguments, tmp_path).check == check


def test_workers_of_others_that_have_ended_well_leave_nothing_to_start_again(
    tmp_path: Path,
) -> None:
    ends = [WorkersEnded(node="n1", exit_code=1), WorkersEnded(node="n2", exit_code=0)]
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    assert decide(failure(tmp_path), ends, 1, environ).plan == "stop"
