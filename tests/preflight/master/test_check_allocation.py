# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` inside a job, with Slurm's own commands missing or played."""

import getpass
import json
import os
import sys
from pathlib import Path

from slurm_health.preflight.job_spec import JobSpec
from slurm_health.records.records import RunStarted, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.lab.site_files import let_root_drain
from tests.support.command_line import Done, slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import Clock, run_started
from tests.support.supervised import write_executable

NODES = ["n1", "n2", "n3"]
IN_JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURMD_NODENAME": "n1",
}
SRUN_SAYS = Path(__file__).parents[2] / "data/slurm-22.05/srun-job-ended.txt"
STARTED = run_started(NODES, user=getpass.getuser())
VERDICT = VerdictReached(
    nodes=[
        NodeVerdict(node="n1", level=Level.HEALTHY),
        NodeVerdict(node="n2", level=Level.FAULTY, component="network", reason="no allgather"),
        NodeVerdict(node="n3", level=Level.HEALTHY),
    ]
)


class Shrinking:
    """A job that goes on with two of its three nodes; its check has found n2 faulty."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(12, NODES)
        write_executable(
            directory / "srun", "#!/bin/sh\nexit 1\n"
        )  # a check that has its verdict starts no agents
        self.environ = self.slurm.environ() | let_root_drain(directory) | IN_JOB
        self.environ["PATH"] = f"{directory}:{self.environ['PATH']}"
        self.root = directory / "journal"
        self.run = journal.job_directory(self.root, "lab", 12) / "0"
        journal.create(self.run, [journal.MASTER, *NODES])
        journal.Writer(self.run, journal.MASTER, Clock()).append(STARTED, VERDICT)

    def check(self, run_id: str) -> Done:
        spec = JobSpec(journal=str(self.root), python=sys.executable, nodes_wanted=2)
        return slurm_health("supervised-check", run_id, spec.encoded(), environ=self.environ)


def supervise(directory: Path) -> Done:
    """Check and run the script that a directory has, with the srun there."""
    spec = JobSpec(python=sys.executable, journal=f"{directory}/journal")
    return slurm_health(
        "supervise",
        f"--spec={spec.encoded()}",
        "--script-line=1",
        "--script-name=script",
        "--",
        f"{directory}/script",
        environ=IN_JOB | {"PATH": f"{directory}:{os.environ['PATH']}"},
    )


def test_a_check_that_ended_unheard_answers_the_same_and_does_nothing_more(tmp_path: Path) -> None:
    job = Shrinking(tmp_path)
    unheard = job.check("r")
    answer = json.loads(unheard.stdout.splitlines()[-1])
    written, calls = (job.run / "master.jsonl").read_bytes(), job.slurm.calls()
    assert (answer["disposition"], answer["nodes"]) == ("proceed", ["n1", "n3"])
    assert job.slurm.job(12)["nodes"] == ["n1", "n3"]

    again = job.check("r")

    assert (again.code, json.loads(again.stdout)) == (unheard.code, answer)
    assert (job.run / "master.jsonl").read_bytes() == written
    assert job.slurm.calls() == calls
    assert [path.name for path in job.run.parent.iterdir()] == ["0"]


def test_a_batch_jobs_check_bears_one_name_however_often_it_is_started(tmp_path: Path) -> None:
    write_executable(
        tmp_path / "srun",
        f"#!/bin/sh\ntr '\\0' ' ' </proc/$PPID/cmdline >>{tmp_path}/starts\n"
        f"echo >>{tmp_path}/starts; kill -KILL $PPID",
    )
    (tmp_path / "script").write_text("#!/bin/sh\n")

    done = supervise(tmp_path)

    starts = (tmp_path / "starts").read_text().splitlines()
    assert (done.code, len(starts), len(set(starts))) == (0, 2, 1), done.stderr
    assert "supervised-check" in starts[0]
    directory = journal.job_directory(tmp_path / "journal", "lab", 12) / "0"
    started = journal.read_all(directory, journal.MASTER)[0].record
    assert isinstance(started, RunStarted)
    assert started.run_id in starts[0].split()


def test_the_script_of_a_job_that_slurm_has_ended_is_not_started(tmp_path: Path) -> None:
    """Slurm may tell the batch host of a cancelled job only seconds later."""
    write_executable(tmp_path / "srun", f"#!/bin/sh\ncat {SRUN_SAYS} >&2; exit 1\n")
    (tmp_path / "script").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")

    done = supervise(tmp_path)

    assert done.code == 4
    assert "the job stops: Slurm has ended it already (Slurm job 1 has expired)" in done.stderr
    assert not (tmp_path / "ran").exists()
