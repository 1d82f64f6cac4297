# SPDX-License-Identifier: Apache-2.0
"""What is said at submission of a job that may run unchecked, and what is left unsaid."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

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


# --- torch ---------------------------------------------------------------------------------------


def test_where_no_interpreter_has_torch_both_are_named_with_what_to_do(desk: Desk) -> None:
    (said,) = desk.said(asked={"gpus-per-node": "8"})
    assert said == (
        f"no torch found by {desk.job} or {desk.ours}: where the nodes have none either, light"
        " probes check them, which see no GPU and no NCCL; if the job trains with torch, name the"
        " interpreter it trains with: #HEALTH --python=PATH"
    )
    (said,) = desk.said(JobSpec(python=str(desk.job)))
    assert f"no torch found by {desk.job}: " in said


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


@rows
def test_nothing_is_said_of_a_job_without_a_wish_for_torch_or_with_another_image_or_path(
    desk: Desk, spec: JobSpec, asked: dict[str, str]
) -> None:
    assert desk.said(spec, asked=asked) == []


def test_nothing_is_said_where_a_setup_decides(desk: Desk, tmp_path: Path) -> None:
    setup = tmp_path / "env.sh"
    setup.touch()
    assert desk.said(JobSpec(setup=str(setup))) == []
    assert desk.said(JobSpec(setup=str(setup), python="python3.99")) == []


def test_an_interpreter_that_is_not_here_is_named(desk: Desk) -> None:
    for given in ("/no/such/python", "python3.99"):
        (said,) = desk.said(JobSpec(python=given))
        assert f"--python={given}: no such executable here; if the nodes lack it too" in said
    assert desk.said(JobSpec(python="python3.99"), asked={"export": "NONE,A=1"}) == []


@rows
def test_a_line_that_activates_an_environment_is_named_with_the_two_ways_out(
    desk: Desk, line: str
) -> None:
    (said,) = desk.said(script=SCRIPT.replace(b"srun", f"{line}\nsrun".encode()))
    assert f"line 3 of train.sh ({line.strip()}) comes after the check: " in said
    assert "#HEALTH --python=PATH, or put what activates it into a file: #HEALTH --setup=" in said


@pytest.mark.parametrize(
    "line", ["module purge", "module list", "# conda activate", "echo conda activate x"]
)
def test_other_lines_are_not_taken_for_one(desk: Desk, line: str) -> None:
    script = SCRIPT.replace(b"srun", f"{line}\nsrun".encode())
    assert desk.said(script=script) == []


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


def test_a_journal_that_nobody_can_name_is_said(equipped: Desk, tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text("journal = 3")
    (said,) = equipped.said()
    assert "journal: expected a directory, found 3" in said
    assert "UNCHECKED" in said


def test_nothing_is_said_of_a_journal_on_a_disk_that_may_be_shared(equipped: Desk) -> None:
    assert equipped.said(JobSpec(journal=str(Path("~/journal").expanduser()))) == []
    assert equipped.said(JobSpec(journal="/srv/none/journal")) == []


def test_a_setup_that_does_not_exist_and_lines_that_are_not_read_are_named(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.install_torch(tmp_path / "job")
    there = tmp_path / "setup.sh"
    there.touch()
    late = b"#!/bin/sh\n#HEALTH --spares=1\ntrue\n#HEALTH --max-restarts=2\n"

    assert desk.said(JobSpec(setup=str(there))) == desk.said()
    (missing,) = set(desk.said(JobSpec(setup="/nowhere/nope.sh"))) - set(desk.said())
    assert missing.startswith("--setup=/nowhere/nope.sh: cannot be read here")
    (ignored,) = set(desk.said(script=late)) - set(desk.said())
    assert ignored.startswith("line 4 of train.sh: #HEALTH after the first command is ignored")
