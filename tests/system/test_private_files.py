# SPDX-License-Identifier: Apache-2.0
"""What another user laid ready in a shared directory is neither read nor written nor followed."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.records.errors import JournalError
from slurm_health.records.records import MasterWaits
from slurm_health.system import journal, private_files
from tests.support.full_filesystem import full_filesystem
from tests.support.journals import Clock

WORD = MasterWaits(reason="")


class Shared:
    """A directory as `doctor` advises, with the journal of this user's job 12 in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = root / "lab"
        for path in (root, self.cluster):
            path.mkdir()
            path.chmod(0o1777)
        self.job = self.cluster / "12"
        self.run = self.job / "0"
        journal.create(self.run, [journal.MASTER])
        journal.Writer(self.run, journal.MASTER, Clock()).append(WORD)
        self.master = journal.path_of(self.run, journal.MASTER)


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path / "shared")


def link(path: Path, target: str) -> None:
    path.rename(path.with_name(target))
    path.symlink_to(target)


def replace(path: Path, *, by: str) -> None:
    path.unlink()
    if by == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(by)


HOSTILE: dict[str, Callable[[Shared], None]] = {
    "a job that all can write": lambda shared: shared.job.chmod(0o777),
    "a run that the group can write": lambda shared: shared.run.chmod(0o770),
    "a file that others can write": lambda shared: shared.master.chmod(0o622),
    "a cluster that all can change": lambda shared: shared.cluster.chmod(0o777),
    "a file of two names": lambda shared: os.link(shared.master, shared.cluster / "second"),
    "a linked job": lambda shared: link(shared.job, "13"),
    "a linked run": lambda shared: link(shared.run, "1"),
    "a linked cluster": lambda shared: link(shared.cluster, "other"),
    "a linked file": lambda shared: link(shared.master, "real"),
    "a device": lambda shared: replace(shared.master, by="/dev/zero"),
    "a pipe": lambda shared: replace(shared.master, by="a pipe"),
}


USES: dict[str, Callable[[Path], object]] = {
    "create": lambda run: journal.create(run, [journal.MASTER, "n1"]),
    "write": lambda run: journal.Writer(run, journal.MASTER, Clock()).append(WORD),
    "read": lambda run: journal.read_all(run, journal.MASTER),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_what_others_can_change_is_not_used(
    shared: Shared, hostile: Callable[[Shared], None], use: Callable[[Path], object]
) -> None:
    hostile(shared)

    owner = ""
    for path in (shared.job, shared.run):
        if path.is_symlink() and os.geteuid() == 0:  # whoever owns a link in the way is named
            os.lchown(path, 1, 1)
            owner = "is a link or a file.* to user 1;"

    with pytest.raises(JournalError, match=rf"cannot be (read|written): .*{owner}"):
        use(shared.run)


@pytest.mark.root
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("level", ["cluster", "job", "run", "master"])
def test_what_belongs_to_another_is_not_used_and_the_owner_is_named(
    shared: Shared, level: str, use: Callable[[Path], object]
) -> None:
    os.chown(getattr(shared, level), 1, 1)

    with pytest.raises(JournalError, match=r"belongs to user 1.* --journal DIR"):
        use(shared.run)


@pytest.mark.root
def test_root_reads_anybodys_journal_but_only_what_is_that_persons(shared: Shared) -> None:
    for path in (shared.job, shared.run, shared.master):
        os.chown(path, 1, 1)
    assert len(journal.read_all(shared.run, journal.MASTER, of_anybody=True)) == 1

    os.chown(shared.master, 2, 2)
    with pytest.raises(JournalError, match="belongs to user 2, not to user 1"):
        journal.read_all(shared.run, journal.MASTER, of_anybody=True)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_every_level_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        journal.create(tmp_path / "new" / "root" / "lab" / "12" / "0", [journal.MASTER])
    finally:
        os.umask(before)

    made = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert len(made) == 5
    assert {mode for path, mode in made.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in made.items() if path.is_file()} == {0o600}


def test_the_word_of_a_device_or_a_pipe_is_not_waited_for(shared: Shared) -> None:
    replace(shared.master, by="a pipe")
    code = (
        "import sys, pathlib\nfrom slurm_health.system import journal\n"
        "journal.read_all(pathlib.Path(sys.argv[1]), 'master', of_anybody=True)"
    )
    argv = [sys.executable, "-c", code, str(shared.run)]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert "not a plain file" in done.stderr


def test_a_file_of_any_size_is_not_read_into_memory(shared: Shared) -> None:
    os.truncate(shared.master, private_files.MOST_BYTES + 1)

    with pytest.raises(JournalError, match=f"limit {private_files.MOST_BYTES}"):
        USES["read"](shared.run)


@pytest.mark.root
def test_a_temporary_file_lies_in_the_next_place_where_the_first_is_full(tmp_path: Path) -> None:
    code = (
        "from slurm_health.system import private_files\n"
        "with private_files.temporary('script', b'x' * 9999, mode=0o700) as path:\n"
        "    print(path, oct(path.stat().st_mode & 0o777), path.stat().st_size)\n"
        "assert not path.parent.exists()\n"
    )
    with full_filesystem(tmp_path / "full") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(full)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert list(full.iterdir()) == []

    path, *rest = done.stdout.split()
    assert not path.startswith(str(full))
    assert Path(path).name == "script"
    assert rest == ["0o700", "9999"]


# --- files that root writes where another account may write too ---------------------------------


def test_a_published_file_follows_no_link_that_was_laid_ready(tmp_path: Path) -> None:
    victim = tmp_path / "shadow"
    victim.write_text("root's")
    victim.chmod(0o600)
    place = tmp_path / "textfile"
    place.mkdir()
    for name in ("x.prom", f".x.prom.{os.uname().nodename}.{os.getpid()}", ".x.prom.new"):
        (place / name).symlink_to(victim)

    private_files.publish(place / "x.prom", b"told")

    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("root's", 0o600)
    assert not (place / "x.prom").is_symlink()
    assert (place / "x.prom").read_bytes() == b"told"
    assert stat.S_IMODE((place / "x.prom").stat().st_mode) == 0o644


@pytest.mark.root
def test_the_mode_that_another_user_has_prepared_is_not_taken_over(tmp_path: Path) -> None:
    planted = tmp_path / "x.prom"
    planted.touch()
    os.chown(planted, 65534, 65534)
    planted.chmod(0o4777)

    private_files.publish(planted, b"told")

    found = planted.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o644)


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1777])
def test_no_file_is_published_that_runs_as_its_owner(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match="must not be published with mode"):
        private_files.publish(tmp_path / "x.prom", b"told", mode=mode)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.prom").mkdir()
    with pytest.raises(IsADirectoryError):
        private_files.publish(tmp_path / "x.prom", b"told")
    assert [each.name for each in tmp_path.iterdir()] == ["x.prom"]


def test_files_for_others_are_written_in_one_place() -> None:
    """Whatever makes a file beside its place and renames it does so by `publish`."""
    package = Path(private_files.__file__).parents[1]
    renames = re.compile(r"\bfresh\.replace\(|os\.replace\(|\.with_name\(f?\"\.")
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if renames.search(path.read_text())
    }
    assert users == {"system/journal/directories.py"}  # a link, and never a file
