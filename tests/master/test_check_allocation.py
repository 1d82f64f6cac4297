# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` inside a job of a cluster that is nothing but commands on the PATH."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_health import journal
from slurm_health.core.records import ActionIntended, MasterResumed, Record, RoundStarted
from tests.support.command_line import Done, finish, slurm_health, start
from tests.support.fake_slurm import FakeSlurm
from tests.support.supervised import descendants, eventually, with_variable

FAKE_WORKER = str(Path(__file__).parents[1] / "support" / "fake_worker.py")
JOB = 12


class Site:
    """A cluster of four nodes and a job on the first three."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(JOB, ["n1", "n2", "n3"])
        self.workers = directory / "workers"
        self.workers.mkdir()
        self.root = directory / "journal"
        self.run = journal.job_directory(self.root, "lab", JOB) / "0"

    def environ(self) -> dict[str, str]:
        return {
            **self.slurm.environ(),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_CLUSTER_NAME": "lab",
            "SLURMD_NODENAME": "n1",
            "SLURM_NTASKS": "3",
            "FAKE_WORKER_DIR": str(self.workers),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def words(self, *more: str) -> list[str]:
        common = [f"--python={FAKE_WORKER}", f"--journal={self.root}", "--round-deadline=2"]
        return ["check", *common, *more]

    def check(self, *more: str, environ: Mapping[str, str] | None = None) -> Done:
        return slurm_health(*self.words(*more), environ={**self.environ(), **(environ or {})})

    def behave(self, node: str, how: str) -> None:
        (self.workers / node).write_text(how)

    def of_kind(self, kind: type[Record]) -> list[Record]:
        entries = journal.read_all(self.run, journal.MASTER)
        return [e.record for e in entries if isinstance(e.record, kind)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def verdicts(done: Done) -> dict[str, str]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["nodes"]
    return {node["node"]: node["level"] for node in found}


def test_a_healthy_job_costs_one_step_and_no_other_call(site: Site) -> None:
    done = site.check("--act", "--json")

    assert done.code == 0
    assert verdicts(done) == dict.fromkeys(("n1", "n2", "n3"), "healthy")
    assert [call[0] for call in site.slurm.calls()] == ["srun"]


def test_a_bad_node_is_left_behind(site: Site) -> None:
    site.behave("n3", "dies")

    done = site.check("--act", "--json")

    assert done.code == 1
    assert verdicts(done) == {"n1": "healthy", "n2": "healthy", "n3": "faulty"}
    assert site.slurm.job(JOB)["state"] == "COMPLETING"
    (helper,) = site.slurm.calls("sbatch")
    assert "--exclude=n3" in helper


def test_the_helper_that_was_submitted_lets_the_job_go_elsewhere(site: Site) -> None:
    site.behave("n3", "dies")
    site.check("--act")
    words = shlex.split(str(site.slurm.job(JOB + 1)["script"]))
    submitted = words[words.index("requeue-helper") :]

    helped = slurm_health(*submitted, environ=site.slurm.environ())

    assert helped.code == 0
    assert site.slurm.job(JOB)["ExcNodeList"] == "n3"
    assert site.slurm.job(JOB)["Priority"] > 0


def test_without_act_nothing_is_done_about_a_bad_node(site: Site) -> None:
    site.behave("n3", "dies")

    done = site.check("--json")

    assert done.code == 1
    assert {call[0] for call in site.slurm.calls()} == {"srun"}


def test_a_node_on_which_no_step_starts_is_faulty_and_the_others_are_checked(site: Site) -> None:
    site.slurm.set(dead_nodes=["n2"])

    done = site.check("--json")

    assert verdicts(done) == {"n1": "healthy", "n2": "faulty", "n3": "healthy"}
    assert done.code == 1


def test_a_master_that_is_killed_in_a_round_is_gone_on_for_in_the_same_run(site: Site) -> None:
    site.behave("n3", "stuck")
    first = start(*site.words("--act"), environ=site.environ())
    eventually(lambda: site.of_kind(RoundStarted), "the first round")
    below = descendants(first.pid)
    first.kill()
    finish(first)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")

    done = site.check("--act", "--json")

    assert verdicts(done) == {"n1": "healthy", "n2": "healthy", "n3": "faulty"}
    assert len(site.of_kind(MasterResumed)) == 1
    assert [path.name for path in site.run.parent.iterdir()] == ["0"]


def test_a_master_that_is_killed_while_it_acts_does_nothing_twice(site: Site) -> None:
    site.slurm.set(admin=True, hang=["scontrol"])
    site.behave("n3", "raises")
    first = start(*site.words("--act"), environ=site.environ())
    eventually(lambda: site.of_kind(ActionIntended), "the first act")
    site.slurm.set(hang=[])
    eventually(lambda: site.slurm.calls("sbatch"), "the helper's submission")
    site.slurm.set(hang=["scontrol"])
    first.kill()
    finish(first)
    site.slurm.set(hang=[])
    eventually(lambda: not with_variable("FAKE_SLURM_DIR", str(site.slurm.directory)), "peace")
    site.slurm.change_job(JOB, state="RUNNING")

    done = site.check("--act", "--json")

    assert done.code == 1
    assert len(site.slurm.calls("sbatch")) == 1
    assert len([call for call in site.slurm.calls() if "State=DRAIN" in call]) <= 1
    assert site.slurm.job(JOB)["state"] == "COMPLETING"
    assert [path.name for path in site.run.parent.iterdir()] == ["0"]


def test_a_second_check_in_the_same_job_is_a_run_of_its_own(site: Site) -> None:
    site.check()
    site.check()

    assert sorted(path.name for path in site.run.parent.iterdir()) == ["0", "0-2"]


def test_without_srun_the_error_says_where_to_find_it(site: Site, tmp_path: Path) -> None:
    done = site.check(environ={"PATH": str(tmp_path)})

    assert done.code == 4
    assert "srun not found on PATH" in done.stderr


def test_an_array_task_is_reported_under_the_id_its_user_knows(site: Site) -> None:
    site.check(environ={"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"})

    done = slurm_health("report", "11_3", f"--journal={site.root}")

    assert done.code == 0
    assert "n[1-3]" in done.stdout
