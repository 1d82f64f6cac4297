# SPDX-License-Identifier: Apache-2.0

import dataclasses
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.framework import DataCollector
from slurm_health.training.monitor import post_mortem
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import JobOutput, MonitorFindings
from slurm_health.training.monitor.registry import Registered
from tests.support.ended_jobs import hang_at, job
from tests.support.rows import rows
from tests.training.monitor.test_flight_dumps import dump


def ended(directory: Path, *, exit_code: int = 1, **more: Any) -> EndedJob:
    end = ScriptEnd(exit_code=exit_code, nodes=("n1",), script="train.sh")
    return job(directory, end=end, environ={"HOME": str(directory)}, **more)


def held(
    job: EndedJob,
    *,
    collectors: Sequence[DataCollector] = (),
    directory: Path | None = None,
) -> tuple[Diagnosed, str]:
    out = io.StringIO()
    found = post_mortem.run_post_mortem(
        job,
        directory,
        clock=lambda: 2e9,
        used=Registered(),
        collectors=collectors or [JobOutput(job)],
        limit_s=30.0,
        out=out,
    )
    assert found is not None
    return found, out.getvalue()


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "journal" / "lab" / "12" / "0"
    journal.create(directory, [journal.MASTER])
    return directory


@rows
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
    job = dataclasses.replace(ended(tmp_path, outputs=(output,)), environ={variable: told})
    found, text = held(job, collectors=[JobOutput(job), FlightDumps(job)])

    assert (found.cause == "mismatched-collective") is counts, text
    assert ("may be of another training" in str(found.not_collected)) is not counts


def test_a_journal_that_cannot_be_written_costs_only_the_record(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'lr'\n")
    _, said = held(
        ended(tmp_path, outputs=(output,)), directory=tmp_path / "journal" / "lab" / "12" / "0"
    )

    assert "why train.sh failed" in said
    assert "the post-mortem is not recorded" in said


def test_a_script_that_ended_well_is_not_written_about(tmp_path: Path) -> None:
    out = io.StringIO()
    job = ended(tmp_path, exit_code=0)

    assert post_mortem.run_post_mortem(job, None, clock=lambda: 0.0, out=out) is None
    assert out.getvalue() == ""


HUNG = hang_at("rank-stopped", "rank 1 on n1 has been stopped", nodes=["n1"])


def test_a_hang_that_the_monitor_recorded_explains_a_failure_that_nothing_else_does(
    tmp_path: Path, run_directory: Path
) -> None:
    journal.Writer(run_directory, journal.MONITOR, lambda: 1e9).append(HUNG)
    job = ended(tmp_path, run_directory=run_directory)
    found, said = held(job, collectors=[MonitorFindings(job)])

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

    assert held(job, collectors=[MonitorFindings(job)])[0].cause == "script-failed"


def test_what_the_check_met_before_is_joined_to_the_same_error_of_all_ranks(
    tmp_path: Path, run_directory: Path
) -> None:
    words = "ifa != nullptr. Unable to find address for: ibp1"
    doubted = [
        NodeVerdict(node=node, level=Level.INCONCLUSIVE, reason=f"crashed in round 1 ({words})")
        for node in ("n1", "n2")
    ]
    master = journal.Writer(run_directory, journal.MASTER, lambda: 1.0)
    master.append(VerdictReached(nodes=doubted))
    output = tmp_path / "out"
    of_rank = "[rank{0}]: Traceback (most recent call last):\n[rank{0}]: RuntimeError: {1}\n"
    end = "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n"
    output.write_text("".join(of_rank.format(rank, words) for rank in (0, 1)) + end)
    job = ended(tmp_path, outputs=(output,), run_directory=run_directory)
    found, said = held(job, collectors=[JobOutput(job), MonitorFindings(job)])

    assert (found.cause, found.attribution) == ("network-interface-missing", "user error")
    assert "n[1-2]: one that they share; the check before the script met it too: crashed" in said
