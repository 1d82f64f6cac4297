# SPDX-License-Identifier: Apache-2.0
"""`make release`: two builds are the same, and the checksums are of what is there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distribution import release

ROOT = Path(__file__).parents[2]


def test_checksums_are_read_by_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"b")
    (tmp_path / "a.tar.gz").write_bytes(b"a")
    sums = release.checksums(tmp_path)
    again = release.checksums(tmp_path).read_text()  # not of itself

    assert sums.read_text() == again
    assert [line.split()[1] for line in again.splitlines()] == ["a.tar.gz", "b.whl"]
    if shutil.which("sha256sum"):
        command = ["sha256sum", "--check", "--strict", "--quiet", sums.name]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("epoch", "there", "said"),
    [("1700000000", "old.whl", "is not empty"), (None, None, "set SOURCE_DATE_EPOCH")],
)
def test_a_release_is_not_made_beside_another_nor_of_todays_time(
    tmp_path: Path, epoch: str | None, there: str | None, said: str
) -> None:
    if there:
        (tmp_path / there).touch()
    environ = {key: text for key, text in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    environ |= {"SOURCE_DATE_EPOCH": epoch} if epoch else {}

    words = [sys.executable, "-m", "distribution.release", "--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_in_no_commit_comes_into_no_release(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / ".gitignore").write_text("dist/\n")
    (tmp_path / "README.md").touch()
    git("add", ".")
    git("commit", "--message", "begin")
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "old.whl").touch()
    assert release.uncommitted(tmp_path) == []

    (tmp_path / "token.env").write_text("secret")
    (tmp_path / "README.md").write_text("changed")

    assert sorted(release.uncommitted(tmp_path)) == ["README.md", "token.env"]


def test_an_unpacked_source_archive_has_no_commits_to_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()

    assert release.uncommitted(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_has_the_same_wheel_twice_and_names_what_is_installed_with_it(
    tmp_path: Path,
) -> None:
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    options = ["--no-packages", "--uncommitted", "--output"]
    words = [sys.executable, "-m", "distribution.release", *options]

    done = subprocess.run(
        [*words, str(tmp_path)], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert {"slurm_health", "sbom.cdx.json", "SHA256SUMS"} <= names
    bill = (tmp_path / "sbom.cdx.json").read_text()
    assert all(f'"name": "{name}"' in bill for name in ("msgspec", "click", "slurm-health"))
    assert "not signed" in done.stderr
