# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor.surroundings import SlurmWord
from tests.support.ended_jobs import job
from tests.support.fake_slurm import FakeSlurm


def test_outside_a_job_slurm_is_not_asked(tmp_path: Path) -> None:
    assert not SlurmWord().is_enabled(job(tmp_path, environ={}))


def test_slurm_is_not_asked_where_it_cannot_know_more_than_the_script(tmp_path: Path) -> None:
    def asked(**end: Any) -> bool:
        return bool(SlurmWord().is_enabled(job(tmp_path, end=ScriptEnd(**end))))

    assert not asked(exit_code=1, nodes=("n1",))
    assert asked(exit_code=143, nodes=("n1",))
    assert asked(exit_code=137, signal=9, nodes=("n1",))
    assert asked(exit_code=1, nodes=("n1", "n2"))


def test_slurm_says_which_nodes_the_job_asks_for_by_name(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1", "n2"], ReqNodeList="n2")
    environ = {**slurm.environ(), "SLURM_JOB_ID": "12"}
    end = ScriptEnd(exit_code=1, nodes=("n1", "n2"))
    found = SlurmWord().collect_data(job(tmp_path, environ=environ, end=end))

    assert set(found.node_states) == {"n1", "n2"}
    assert found.required == ("n2",)
    assert found.job_states == ()
