# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import io
import pickle
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.system import journal
from slurm_health.training.diagnosis.collected import Collected, ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.diagnostician import Diagnostician, observe_failure
from slurm_health.training.diagnosis.inference import (
    Attribution,
    Inference,
    InferenceChain,
    Sureness,
)
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.rank_failures import RankFailure
from slurm_health.training.monitor import post_mortem, registry
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected
from slurm_health.training.monitor.containment import collect, contained
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import MonitorFindings
from slurm_health.training.monitor.registry import COLLECTORS, Registered, registered
from tests.training.monitor.test_flight_dumps import dump

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "post-mortem.md"
EXAMPLE = re.compile(r"<!-- example: run by .*? -->\n```python\n(.*?)```", re.S)


class Weather(msgspec.Struct, frozen=True):
    words: str


class Plugin:
    """A collector of another distribution that does as it is told."""

    data = Weather

    def __init__(self, name: str, how: str = "well") -> None:
        self.name = name
        self._how = how

    def is_enabled(self, _: EndedJob) -> Enabled:
        return Enabled("it rains") if self._how == "off" else Enabled()

    def collect_data(self, _: EndedJob) -> msgspec.Struct:
        if self._how == "raises":
            raise RuntimeError("no barometer")
        if self._how == "hangs":
            time.sleep(600)
        if self._how == "nothing":
            raise NothingCollected("no clouds")
        return ScriptEnd(exit_code=1) if self._how == "other" else Weather("fine")


class Forecaster:
    """An operator of another distribution that does as it is told."""

    def __init__(self, name: str, how: str = "well") -> None:
        self.name = name
        self._how = how

    def is_compatible(self, inference: Inference, _: Collected) -> bool:
        return inference.name == "script-failed"

    def infer(self, _: Inference, data: Collected) -> Sequence[Any]:
        if self._how == "raises":
            raise RuntimeError("no crystal ball")
        if self._how == "hangs":
            time.sleep(600)
        if self._how == "other":
            return ["a sunny day"]
        weather = data.get(Weather)
        return [
            Inference(
                name="weather",
                description=f"the weather was {weather.words if weather else 'not known'}",
                attribution=Attribution.TRANSIENT,
                sureness=Sureness.CERTAIN,
            )
        ]


def ended(
    directory: Path,
    *,
    exit_code: int = 1,
    outputs: Sequence[Path] = (),
    run_directory: Path | None = None,
    ended_s: float = 2e9,
    duration_s: float = 2e9,
) -> EndedJob:
    return EndedJob(
        end=ScriptEnd(exit_code=exit_code, nodes=("n1",), script="train.sh"),
        environ={"HOME": str(directory)},
        node="n1",
        directory=directory,
        outputs=tuple(outputs),
        ended_s=ended_s,
        duration_s=duration_s,
        run_directory=run_directory,
    )


def held(
    job: EndedJob,
    *,
    collectors: Sequence[Any] = (),
    operators: Sequence[Any] = (),
    directory: Path | None = None,
    limit_s: float = 30.0,
) -> tuple[Diagnosed, str]:
    out = io.StringIO()
    used = Registered(tuple(collectors), (*OPERATORS, *operators), {})
    found = post_mortem.hold(
        job,
        directory,
        clock=lambda: 2e9,
        used=used,
        limit_s=limit_s,
        apply=contained(limit_s=60.0, total_s=60.0),
        out=out,
    )
    assert found is not None
    return found, out.getvalue()


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "journal" / "lab" / "12" / "0"
    journal.create(directory, [journal.MASTER])
    return directory


WATCHDOG = (
    "[rank0]:[E1124 02:41:16.350862 ProcessGroupNCCL.cpp:688] [Rank 0] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 4001 milliseconds\n"
)


@pytest.mark.parametrize(
    ("wrote", "variable", "counts"),
    [
        ("", "XDG_CACHE_HOME", False),
        (WATCHDOG, "XDG_CACHE_HOME", True),
        ("", "TORCH_FR_DUMP_TEMP_FILE", True),
    ],
)
def test_dumps_at_torchs_own_path_count_where_a_watchdog_of_this_training_wrote(
    tmp_path: Path, wrote: str, variable: str, counts: bool
) -> None:
    """All trainings of a user leave theirs there: what another left accuses no rank of this one."""
    place = tmp_path / "torch" / "comm_lib_trace_rank_"
    place.parent.mkdir()
    for rank, what in enumerate(("all_reduce", "all_gather")):
        Path(f"{place}{rank}").write_bytes(pickle.dumps(dump("barrier", what)))
    output = tmp_path / "out"
    output.write_text(f"{wrote}[rank1]: Traceback (most recent call last):\n[rank1]: OSError: no\n")
    told = str(place if variable.startswith("TORCH") else tmp_path)
    job = dataclasses.replace(ended(tmp_path, outputs=[output]), environ={variable: told})
    found, text = held(job, collectors=[*COLLECTORS[:1], FlightDumps()])

    assert (found.cause == "mismatched-collective") is counts, text
    assert ("may be of another training" in str(found.not_collected)) is not counts


def test_what_is_found_is_said_and_recorded(tmp_path: Path, run_directory: Path) -> None:
    output = tmp_path / "out"
    output.write_text("[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'lr'\n")
    found, said = held(
        ended(tmp_path, outputs=[output]), collectors=COLLECTORS[:1], directory=run_directory
    )

    assert (found.cause, found.ranks) == ("program-error", [1])
    assert all(line.startswith("slurm-health: ") for line in said.splitlines())
    assert "KeyError: 'lr'" in said
    (entry,) = journal.read_all(run_directory, journal.POST_MORTEM)
    assert entry.record == found


def test_a_journal_that_cannot_be_written_costs_only_the_record(tmp_path: Path) -> None:
    _, said = held(
        ended(tmp_path),
        operators=[Forecaster("forecast")],
        directory=tmp_path / "journal" / "lab" / "12" / "0",
    )

    assert "why train.sh failed" in said
    assert "the post-mortem is not recorded" in said


def test_a_script_that_ended_well_is_not_written_about(tmp_path: Path) -> None:
    out = io.StringIO()
    used = Registered((), OPERATORS, {})
    job = ended(tmp_path, exit_code=0)

    assert post_mortem.hold(job, None, clock=lambda: 0.0, used=used, out=out) is None
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "no barometer"),
        ("hangs", "did not answer within 1 s"),
        ("other", "answered with something else"),
    ],
)
def test_a_collector_that_fails_is_named_and_leaves_the_cause_undecided(
    tmp_path: Path, how: str, said: str
) -> None:
    limit_s = 1.0 if how == "hangs" else 30.0
    found, text = held(ended(tmp_path), collectors=[Plugin("barometer", how)], limit_s=limit_s)

    assert found.attribution == "undecided"
    (failed,) = found.failed
    assert failed.startswith("collector barometer: ")
    assert said in failed
    assert failed in text


@pytest.mark.parametrize(("how", "why"), [("off", "it rains"), ("nothing", "no clouds")])
def test_a_collector_that_is_off_says_why_and_did_not_fail(
    tmp_path: Path, how: str, why: str
) -> None:
    found, text = held(ended(tmp_path), collectors=[Plugin("barometer", how)])

    assert found.failed == []
    assert found.not_collected == [f"barometer: {why}"]
    assert text == ""  # nothing was found, and the script has said what it has to say


@pytest.mark.parametrize(
    ("how", "said", "limit_s"),
    [
        ("raises", "no crystal ball", 30.0),
        ("hangs", "did not answer within 1.0 s", 1.0),
        ("other", "answered with something else", 30.0),
    ],
)
def test_an_operator_that_fails_is_named_and_leaves_the_cause_undecided(
    tmp_path: Path, how: str, said: str, limit_s: float
) -> None:
    operators: list[Any] = [*OPERATORS, Forecaster("forecast", how)]
    chain = InferenceChain(operators, apply=contained(limit_s=limit_s, total_s=60.0))
    seen = collect(ended(tmp_path), (), limit_s=30.0)

    found = Diagnostician(observe_failure, chain).diagnose(seen).diagnosed

    assert found is not None
    assert (found.cause, found.attribution) == ("script-failed", "undecided")
    (failed,) = found.failed
    assert failed.startswith("operator forecast: ")
    assert said in failed


def test_names_of_ours_are_all_different() -> None:
    assert len({each.name for each in COLLECTORS}) == len(COLLECTORS)
    assert len({each.name for each in OPERATORS}) == len(OPERATORS)


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, module: str, points: str) -> None:
    """Install a distribution with one module."""
    (directory / "hints-1.dist-info").mkdir(parents=True)
    (directory / "hints-1.dist-info" / "METADATA").write_text("Name: hints\nVersion: 1\n")
    (directory / "hints-1.dist-info" / "entry_points.txt").write_text(textwrap.dedent(points))
    (directory / "nccl_hints.py").write_text(module)
    monkeypatch.syspath_prepend(directory)


def test_the_operator_that_the_documentation_shows_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = EXAMPLE.search(PAGE.read_text())
    assert shown is not None
    points = f"[{registry.OPERATOR_POINTS}]\ntoo-few-files = nccl_hints:TooFewFiles\n"
    install(tmp_path, monkeypatch, shown[1], points)
    used = registered()
    failure = RankFailure(rank=1, error="OSError: Too many open files", line="rank 1: OSError")

    class Told(Plugin):
        data = TrainingLog  # type: ignore[assignment]

        def collect_data(self, _: EndedJob) -> msgspec.Struct:
            return TrainingLog(failures=(failure,))

    found, _ = held(
        ended(tmp_path), collectors=[Told("told")], operators=used.operators[len(OPERATORS) :]
    )

    assert used.failed == {}
    assert (found.cause, found.attribution) == ("too-few-files", "user error")
    assert found.chain == ["first-failure: rank-failed", "too-few-files: too-few-files"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("while True: pass", "not within 3 s"),
        ("", "TooFewFiles"),
        ("class TooFewFiles: name = 'x'", "it has no is_compatible"),
    ],
    ids=["raises", "hangs", "empty", "no operator"],
)
def test_an_operator_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "nccl_hints", raising=False)
    points = f"[{registry.OPERATOR_POINTS}]\ntoo-few-files = nccl_hints:TooFewFiles\n"
    install(tmp_path, monkeypatch, module, points)
    used = registered()

    assert used.operators == OPERATORS
    assert said in used.failed["too-few-files"]


HUNG = TrainingEvent(
    event=EventKind.HANG,
    stalled_s=33.0,
    usual_s=25.0,
    step=45,
    diagnosed=Diagnosed(
        cause="rank-stopped",
        description="rank 1 on n1 has been stopped",
        attribution="undecided",
        sureness="certain",
        nodes=["n1"],
    ),
)


def test_a_hang_that_the_monitor_recorded_explains_a_failure_that_nothing_else_does(
    tmp_path: Path, run_directory: Path
) -> None:
    journal.Writer(run_directory, journal.MONITOR, lambda: 1e9).append(HUNG)
    job = ended(tmp_path, run_directory=run_directory)
    found, said = held(job, collectors=[MonitorFindings()])

    assert (found.cause, found.sureness) == ("rank-stopped", "certain")
    assert "the training hung before it failed: rank 1 on n1 has been stopped" in said


@pytest.mark.parametrize("over", ["it went on", "it was of an earlier start"])
def test_a_hang_that_was_over_explains_nothing(
    tmp_path: Path, run_directory: Path, over: str
) -> None:
    writer = journal.Writer(run_directory, journal.MONITOR, lambda: 1e9)
    writer.append(HUNG)
    if over == "it went on":
        writer.append(TrainingEvent(event=EventKind.HANG_OVER, stalled_s=40.0, step=46))
    duration_s = 2e9 if over == "it went on" else 100.0
    job = ended(tmp_path, run_directory=run_directory, duration_s=duration_s)

    assert held(job, collectors=[MonitorFindings()])[0].cause == "script-failed"
