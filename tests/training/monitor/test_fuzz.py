# SPDX-License-Identifier: Apache-2.0
"""Whatever a job has printed or left behind is read, and accuses nobody by itself."""

import pickle
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from msgspec import Struct

from slurm_health.records.script_records import Diagnosed
from slurm_health.report.sentences import lines_of
from slurm_health.training.diagnosis.collected import FlightRecords, ScriptEnd, SlurmView
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager, NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import JobOutput
from tests.support.ended_jobs import job
from tests.test_fuzz import ODD, as_text, damaged
from tests.training.monitor.test_flight_dumps import dump

DATA = Path(__file__).parents[2] / "data"
OUTPUTS = [
    *(path.read_bytes() for path in sorted((DATA / "diagnosis").glob("*.txt"))),
    *(path.read_bytes() for path in sorted((DATA / "slurm-22.05").glob("srun-*.txt"))),
]
WORDS = [b"[rank1]: ", b"Traceback (most recent call last):\n", b"\n", b"  File \"", b"rank  : ",
         b"srun: error: n1: task 0: Killed\n", b"tasks 1-99999999: ", b"exitcode  : -9 (pid: 1)\n",
         b"KeyError: 1\n", b"terminate called after throwing an instance of 'x'\n"]  # fmt: skip
SCRIPTS = [b"srun --output=a-%t.txt -e 'b %j' python x\n", b"srun \\\n -o$X/%5t.txt x\n"]
DUMPS = [pickle.dumps(dump("all_reduce", "barrier")), b'{"entries":[{"profiling_name":"x"}]}']
HEALTHY = SlurmView(node_states=dict.fromkeys(("n1", "n2"), "ALLOCATED"))


def diagnosed(*data: Struct) -> Diagnosed:
    end = ScriptEnd(exit_code=1, nodes=("n1", "n2"), script="train.sh")
    collected = DataManager([end, *data])
    found = FailureDiagnostician().diagnose(data_manager=collected)
    assert found.diagnosed is not None
    return found.diagnosed


@given(as_text(damaged(OUTPUTS, ODD + WORDS)))
def test_any_output_is_explained_and_accuses_no_node(text: str) -> None:
    found = diagnosed(read_output([("out", text)], began="2026-11-22T10:00:00"), HEALTHY)

    assert found.accused == []
    assert found.description
    assert all(line.isprintable() for _, line in lines_of(found))


@given(as_text(damaged(SCRIPTS, [*ODD, b"%t", b"%", b"$", b"-o", b"\\"])))
def test_any_script_is_searched_for_files_of_srun(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "a-0.txt").write_text("KeyError: 1\n")
        with suppress(NothingCollected):
            found = JobOutput(job(directory, script_text=text)).collect_data()
            assert diagnosed(found, HEALTHY).accused == []


@given(damaged(DUMPS, [*ODD, b"c", b"cos\nsystem\n", b"(", b"R.", b"]", b"}"]))
def test_any_dump_is_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "flight_0").write_bytes(data)
        (directory / "flight_1").write_bytes(DUMPS[0])
        environ = {"TORCH_FR_DUMP_TEMP_FILE": str(directory / "flight_")}
        with suppress(NothingCollected):
            found = FlightDumps(job(directory, environ=environ)).collect_data()
            assert isinstance(found, FlightRecords)
            assert diagnosed(found, HEALTHY).accused == []
