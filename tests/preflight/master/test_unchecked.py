# SPDX-License-Identifier: Apache-2.0
"""A check that never got to measure still leaves a journal, or a comment where it cannot."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.preflight.master.unchecked import conclude
from slurm_health.records.records import Disposition, JobOutcome, Record, RunStarted, Unchecked
from slurm_health.report import read, text
from slurm_health.report.layout import Page
from slurm_health.system import journal
from tests.support.fake_slurm import FakeSlurm

FOUND = Unchecked(reason="no torch", remedy="name an interpreter")
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_PARTITION": "main",
    "SLURMD_NODENAME": "n1",
}
TASK = {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3"}


class Scene:
    def __init__(self, directory: Path) -> None:
        self.root = directory / "journal"
        self.slurm = FakeSlurm(directory / "slurm")
        for job in (12, "11_3"):
            self.slurm.run_job(job, ["n1", "n2"], Comment="mine")
        self.told: list[tuple[JobOutcome, str]] = []

    def tell(self, finished: JobOutcome, directory: Path | str) -> None:
        self.told.append((finished, str(directory)))

    def conclude(
        self,
        *,
        root: Path | None,
        choice: OnUnchecked = OnUnchecked.PROCEED,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> JobOutcome:
        return conclude(
            FOUND,
            choice,
            root=root,
            run_id="r",
            script="train.sh",
            environ={**self.slurm.environ(), **JOB, **variables},
            tell=self.tell,
        )

    def records(self, run: str = "0") -> list[Record | None]:
        directory = journal.job_directory(self.root, "lab", 12) / run
        return [entry.record for entry in journal.read_all(directory, journal.MASTER)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_check_that_never_began_leaves_a_journal_that_report_reads(scene: Scene) -> None:
    finished = scene.conclude(root=scene.root)
    started, found, ended = scene.records()
    assert isinstance(started, RunStarted)
    assert (started.nodes, started.script) == (["n1", "n2"], "train.sh")
    assert (found, ended) == (FOUND, finished)
    assert scene.told == [(finished, str(scene.root / "lab" / "12" / "0"))]
    assert scene.slurm.calls() == []
    shown = text.job_text(read.load(scene.root, "12"), Page())
    assert "UNCHECKED  no torch" in shown
    assert "NEXT       name an interpreter" in shown
    assert "no verdict" not in shown


def test_a_check_that_died_is_recorded_in_the_journal_it_began(scene: Scene) -> None:
    scene.conclude(root=scene.root)
    scene.conclude(root=scene.root)
    kinds = [type(record) for record in scene.records()]
    assert kinds == [RunStarted, Unchecked, JobOutcome, Unchecked, JobOutcome]


def test_a_task_of_an_array_is_found_under_the_id_its_user_knows(scene: Scene) -> None:
    scene.conclude(root=scene.root, variables=TASK)
    report = read.load(scene.root, "11_3")
    assert report.runs[0].unchecked == FOUND


@pytest.mark.parametrize(
    ("variables", "job"), [({}, 12), (TASK, "11_3")], ids=["job", "task of an array"]
)
@pytest.mark.parametrize("known", [True, False], ids=["known to fail", "fails"])
def test_a_journal_that_fails_leaves_it_to_the_comment(
    scene: Scene, known: bool, variables: dict[str, str], job: int
) -> None:
    scene.root.write_text("no directory")
    finished = scene.conclude(root=None if known else scene.root, variables=variables)
    assert finished.disposition is Disposition.PROCEED
    note = "slurm-health: UNCHECKED: no torch; name an interpreter | own comment: mine"
    assert scene.slurm.job(job)["Comment"] == note
    assert scene.told == [(finished, "")]
    scene.conclude(root=None, variables=variables)
    assert scene.slurm.job(job)["Comment"] == note


@pytest.mark.parametrize("refused", ["--format=%k", "update"])
def test_a_comment_that_cannot_be_read_or_set_ends_nothing(scene: Scene, refused: str) -> None:
    scene.slurm.set(refuse={refused: "no"})
    assert scene.conclude(root=None).disposition is Disposition.PROCEED
    assert scene.slurm.job(12)["Comment"] == "mine"


@pytest.mark.parametrize("choice", OnUnchecked)
def test_outside_of_a_job_nothing_is_asked_of_slurm(scene: Scene, choice: OnUnchecked) -> None:
    finished = scene.conclude(root=scene.root, choice=choice, variables={"SLURM_JOB_ID": ""})
    assert finished.disposition.value == choice.value
    assert scene.slurm.calls() == []
