# SPDX-License-Identifier: Apache-2.0

import resource
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_health.records.errors import ExitCode, JournalError, RecordTooNew
from slurm_health.records.records import Record
from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal
from tests.strategies import records
from tests.support.journals import Clock

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def started(pid: int) -> ScriptStarted:
    return ScriptStarted(script="s", pid=pid)


def pids(directory: Path, writer: str = "n1") -> list[int]:
    found = []
    for entry in journal.read_all(directory, writer):
        assert isinstance(entry.record, ScriptStarted)
        found.append(entry.record.pid)
    return found


def test_what_is_appended_is_read_in_order_and_whoever_takes_over_goes_on(tmp_path: Path) -> None:
    clock = Clock(5.0)
    path = journal.path_of(tmp_path, "n1")
    path.write_bytes(b"\0\0\0\n\n[]\nnot json\n")  # lines that are no records
    reader = journal.Reader(tmp_path, "n1")
    assert reader.read_new() == []
    journal.Writer(tmp_path, "n1", clock).append(started(1), started(2))
    assert [entry.id for entry in reader.read_new()] == ["n1:4", "n1:5"]
    assert reader.read_new() == []
    clock.now_s = 6.00004
    journal.Writer(tmp_path, "n1", clock).append(started(3))
    assert [entry.id for entry in reader.read_new()] == ["n1:6"]

    entries = journal.read_all(tmp_path, "n1")

    assert [entry.time_s for entry in entries] == [5.0, 5.0, 6.0]
    assert pids(tmp_path) == [1, 2, 3]


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    journal.Writer(tmp_path, "n1", Clock()).append(started(1))
    path = journal.path_of(tmp_path, "n1")
    whole = path.read_bytes()
    reader = journal.Reader(tmp_path, "n1")
    path.write_bytes(whole[:10])
    assert reader.read_new() == []
    path.write_bytes(whole)
    assert len(reader.read_new()) == 1


@HERE
@given(st.lists(records(), min_size=1, max_size=5), st.data())
def test_a_file_cut_at_any_byte_loses_the_last_record_at_most(
    tmp_path: Path, written: list[Record], data: st.DataObject
) -> None:
    path = journal.path_of(tmp_path, "n1")
    path.unlink(missing_ok=True)
    journal.Writer(tmp_path, "n1", Clock()).append(*written)
    whole = path.read_bytes()
    cut = data.draw(st.integers(whole.rstrip(b"\n").rfind(b"\n") + 1, len(whole)))
    path.write_bytes(whole[:cut])

    journal.Writer(tmp_path, "n1", Clock()).append(started(7))

    read = [entry.record for entry in journal.read_all(tmp_path, "n1")]
    assert read[-1] == started(7)
    assert read[:-1] in (written, written[:-1])


def test_records_of_a_newer_release_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = journal.path_of(tmp_path, "n1")
    path.write_bytes(b'{"v":99,"id":"n1:0","time_s":0,"kind":"script_started","pid":1}\n')

    with pytest.raises(RecordTooNew, match=r"version 99.*use the slurm-health that wrote it"):
        journal.read_all(tmp_path, "n1")


def test_a_run_is_private_to_its_owner_and_every_file_exists_beforehand(tmp_path: Path) -> None:
    directory = journal.job_directory(tmp_path, "lab", 12) / "0"

    journal.create(directory, [journal.MASTER, "n1"])
    journal.Writer(directory, "n1", Clock()).append(started(1))
    journal.create(directory, [journal.MASTER, "n1"])

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in directory.iterdir()) == ["master.jsonl", "n1.jsonl"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert pids(directory) == [1]  # what exists keeps its content


def test_a_file_in_the_way_of_the_directory_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "lab").touch()

    with pytest.raises(JournalError, match=r"cannot be written: .*--journal DIR") as caught:
        journal.create(tmp_path / "lab" / "12", [journal.MASTER])

    assert caught.value.path == tmp_path / "lab" / "12"
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_a_file_that_cannot_be_read_is_an_error_and_not_an_empty_journal(tmp_path: Path) -> None:
    journal.path_of(tmp_path, "n1").mkdir()

    with pytest.raises(JournalError, match="cannot be read"):
        journal.read_all(tmp_path, "n1")
    with pytest.raises(JournalError, match="cannot be written"):
        journal.Writer(tmp_path, "n1", Clock())


def test_a_full_filesystem_is_an_error_that_says_so(tmp_path: Path) -> None:
    writer = journal.Writer(tmp_path, "n1", Clock())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as full as can be
    try:
        with pytest.raises(JournalError, match="File too large"):
            writer.append(started(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
