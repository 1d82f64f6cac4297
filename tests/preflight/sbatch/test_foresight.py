# SPDX-License-Identifier: Apache-2.0
"""What is said at submission of a job that may run unchecked, and what is left unsaid."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from slurm_health.preflight.config import SITE_FILE_VARIABLE
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.sbatch.foresight import warnings
from slurm_health.system.proc import mount_of, mounted
from tests.support.rows import rows
from tests.support.supervised import write_executable

SCRIPT = b"#!/bin/sh\n#SBATCH -N2\nsrun train\n"


def program(directory: Path, name: str = "false") -> Path:
    """Lay down a compiled program as `python3` that has no torch: asked for it, it ends with 1."""
    (directory / "bin").mkdir(parents=True)
    found = shutil.which(name)
    assert found is not None
    return Path(shutil.copy(found, directory / "bin" / "python3"))


class Desk:
    """Where a job is submitted from: with no torch, and a journal on a disk."""

    def __init__(self, directory: Path) -> None:
        self.job = program(directory / "job")
        self.ours = program(directory / "ours")
        self.environ = {
            "PATH": str(self.job.parent),
            "HOME": str(Path.home()),  # where a journal may be made
            SITE_FILE_VARIABLE: str(directory / "none.toml"),
        }

    def said(
        self,
        spec: JobSpec | None = None,
        script: bytes = SCRIPT,
        asked: Mapping[str, str] | None = None,
        **variables: str,
    ) -> list[str]:
        return warnings(
            spec or JobSpec(),
            script,
            "train.sh",
            asked=asked or {},
            environ={**self.environ, **variables},
            python=str(self.ours),
        )

    def install_torch(self, below: Path) -> None:
        torch = below / "lib" / "python3.11" / "site-packages" / "torch"
        torch.mkdir(parents=True)
        (torch / "__init__.py").touch()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """What is submitted where, and the beginning of what is said, with words that come later."""

    says: list[str]
    torch: bool = False
    spec: dict[str, str] = {}
    asked: dict[str, str] = {}
    line: str = ""
    site: str = ""


@rows
def test_what_may_keep_a_job_from_its_check_is_said_and_nothing_else(
    desk: Desk, tmp_path: Path, case: Case
) -> None:
    if case.torch:
        desk.install_torch(desk.ours.parents[1])
    if case.site:
        (tmp_path / "none.toml").write_text(case.site)
    spec = {name: text.replace("{job}", str(desk.job)) for name, text in case.spec.items()}
    script = SCRIPT.replace(b"srun", f"{case.line}\nsrun".encode()) if case.line else SCRIPT

    said = desk.said(msgspec.convert(spec, JobSpec), script, asked=case.asked)

    assert len(said) == len(case.says)
    for text, words in zip(said, case.says, strict=True):
        for part in words.format(job=desk.job, ours=desk.ours).split("|"):
            assert part in text


def test_torch_of_the_job_or_of_slurm_health_is_enough(desk: Desk, tmp_path: Path) -> None:
    desk.install_torch(desk.ours.parents[1])
    assert desk.said() == []
    assert desk.said(JobSpec(python=str(desk.job)))
    desk.install_torch(desk.job.parents[1])
    assert desk.said(JobSpec(python=str(desk.job))) == []
    venv = tmp_path / "venv" / "bin" / "python"
    venv.parent.mkdir(parents=True)
    venv.symlink_to(desk.job)  # one that sees what its base has
    assert desk.said(JobSpec(python=str(venv))) == []


def test_an_interpreter_whose_torch_lies_elsewhere_is_asked(desk: Desk, tmp_path: Path) -> None:
    assert desk.said(JobSpec(python=str(program(tmp_path / "elsewhere", "true")))) == []


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexec apptainer exec x python3\n", "#!/bin/sh\nexit 1"]
)
def test_nothing_is_said_of_an_interpreter_that_is_a_script(
    desk: Desk, tmp_path: Path, text: str
) -> None:
    wrapper = write_executable(tmp_path / "python", text + "touch $HERE/called\n")
    assert desk.said(JobSpec(python=str(wrapper)), HERE=str(tmp_path)) == []
    assert not (tmp_path / "called").exists()


def test_the_interpreter_of_an_environment_that_is_here_is_named(
    desk: Desk, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (said,) = desk.said(script=SCRIPT + f"source {venv}/bin/activate\n".encode())
    assert f"#HEALTH --python={venv}/bin/python, or" in said


# --- the journal ---------------------------------------------------------------------------------


@pytest.fixture
def equipped(desk: Desk) -> Desk:
    desk.install_torch(desk.ours.parents[1])
    return desk


def test_a_journal_in_memory_is_named(equipped: Desk) -> None:
    if mount_of(mounted(), "/dev/shm").kind != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    (said,) = equipped.said(JobSpec(journal="/dev/shm/no/such/journal"))
    assert said.startswith(
        "the journal /dev/shm/no/such/journal lies on this machine alone (tmpfs): nodes cannot"
        " share it, so a job of several nodes runs UNCHECKED"
    )
    assert said.endswith("another directory: --journal=DIR")
    assert equipped.said(SLURM_HEALTH_JOURNAL="/dev/shm/journal")


@pytest.mark.root
def test_a_journal_that_cannot_be_written_is_named(equipped: Desk, tmp_path: Path) -> None:
    place = tmp_path / "read-only"
    place.mkdir()
    bound = subprocess.run(["mount", "--bind", place, place], check=False, capture_output=True)
    if bound.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        (said,) = equipped.said(JobSpec(journal=str(place / "journal")))
        assert f"cannot be made, as {place} cannot be written here: the job runs UNCHEC" in said
    finally:
        subprocess.run(["umount", place], check=True)
