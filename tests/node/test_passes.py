# SPDX-License-Identifier: Apache-2.0
"""A node that has passed is let off for a while; whatever is unclear has it checked."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import passes
from slurm_health.node.passes import Pass
from slurm_health.node.rules.recovery import BootTime

US = os.geteuid()
CHECKS = frozenset({"memory", "gpu"})


def at(uptime_s: float, boot: str = "b-1") -> BootTime:
    return BootTime(boot=boot, uptime_s=uptime_s)


def passed(began_s: float = 100.0, **others: object) -> Pass:
    known = {"hook": "prolog", "checks": CHECKS, "began": at(began_s), "by": "1"}
    return Pass(**{**known, **others})  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "passes"
    passes.add(directory, passed())
    return directory


def lately(place: Path, uptime_s: float = 130.0, within_s: float = 60.0) -> list[Pass]:
    return passes.recent(place, at(uptime_s), within_s, owner=US)


def test_one_of_another_boot_or_of_a_time_to_come_does_not(place: Path) -> None:
    assert passes.recent(place, at(130, "b-2"), 60, owner=US) == []
    assert lately(place, 99) == []
    assert passes.recent(place, None, 60, owner=US) == []


def test_a_check_that_was_under_way_when_a_fault_was_seen_is_no_pass(place: Path) -> None:
    passes.revoke(place, at(120))
    passes.add(place, passed(119))
    assert lately(place) == []
    passes.add(place, passed(121))
    assert lately(place) == [passed(121)]


def test_a_fault_of_an_earlier_boot_is_over(place: Path) -> None:
    passes.revoke(place, at(120))
    passes.add(place, passed(5, began=at(5, "b-2")))
    assert len(passes.recent(place, at(10, "b-2"), 60, owner=US)) == 1


def test_what_another_user_could_have_written_is_no_pass(place: Path) -> None:
    file = place / "passes.json"
    assert passes.recent(place, at(130), 60, owner=US + 1) == []
    file.chmod(0o666)
    assert lately(place) == []
    file.chmod(0o644)
    place.chmod(0o777)
    assert lately(place) == []


@pytest.mark.parametrize("other", ["passes.json", "fault.json"])
def test_links_pipes_and_nonsense_are_no_pass(place: Path, other: str) -> None:
    file = place / other
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/version")
    assert lately(place) == []
    file.unlink()
    os.mkfifo(file)
    assert lately(place) == []
    file.unlink()
    file.write_text("[[[[")
    assert lately(place) == []


def test_a_directory_of_others_is_not_written_to(place: Path) -> None:
    place.chmod(0o777)
    passes.add(place, passed(110))
    place.chmod(0o755)
    assert lately(place) == [passed()]


def test_a_pass_of_no_check_is_none(tmp_path: Path) -> None:
    passes.add(tmp_path / "passes", passed(checks=frozenset()))
    assert not [*tmp_path.iterdir()]


def test_a_pass_covers_what_it_was_of_and_went_by() -> None:
    found = [passed(expected={"SLURM_JOB_GPUS": "0"})]
    assert passes.covers(found, found[0])
    assert passes.covers(found, passed(checks=frozenset({"gpu"}), expected=found[0].expected))
    assert not passes.covers(found, passed(expected={"SLURM_JOB_GPUS": "1"}))
    for other in ({"checks": CHECKS | {"xid"}}, {"by": "2"}, {"hook": "healthcheck"}):
        assert not passes.covers(found, msgspec.structs.replace(found[0], **other))


def test_of_many_kinds_of_passes_the_newest_are_kept(place: Path) -> None:
    for number in range(40):
        passes.add(place, passed(101, expected={"SLURM_JOB_GPUS": str(number)}))
    kept = [each.expected["SLURM_JOB_GPUS"] for each in lately(place)]
    assert kept == [str(number) for number in range(39, 23, -1)]
    assert len({*kept}) == 16
