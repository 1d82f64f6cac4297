# SPDX-License-Identifier: Apache-2.0
"""A pass spares the next job's checks on its node, until something is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_health.node import passes
from slurm_health.node.passes import Pass
from slurm_health.node.rules.recovery import BootTime
from tests.support.accusing import Story, journal
from tests.support.hooked_node import Node

US = os.geteuid()
CHECKS = frozenset({"memory", "gpu"})


def at(uptime_s: float, boot: str = "b-1") -> BootTime:
    return BootTime(boot=boot, uptime_s=uptime_s)


def passed(began_s: float = 100.0, **others: object) -> Pass:
    known = {"hook": "prolog", "checks": CHECKS, "began": at(began_s), "by": "1"}
    return Pass(**{**known, **others})  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "passes"
    passes.add(directory, passed())
    return directory


def lately(directory: Path, uptime_s: float = 130.0, within_s: float = 60.0) -> list[Pass]:
    return passes.recent(directory, at(uptime_s), within_s, owner=US)


def test_one_of_another_boot_or_of_a_time_to_come_does_not(directory: Path) -> None:
    assert passes.recent(directory, at(130, "b-2"), 60, owner=US) == []
    assert lately(directory, 99) == []
    assert passes.recent(directory, None, 60, owner=US) == []


def test_a_check_that_was_under_way_when_a_fault_was_seen_is_no_pass(directory: Path) -> None:
    passes.revoke(directory, at(120))
    passes.add(directory, passed(119))
    assert lately(directory) == []
    passes.add(directory, passed(121))
    assert lately(directory) == [passed(121)]


def test_a_fault_of_an_earlier_boot_is_over(directory: Path) -> None:
    passes.revoke(directory, at(120))
    passes.add(directory, passed(5, began=at(5, "b-2")))
    assert len(passes.recent(directory, at(10, "b-2"), 60, owner=US)) == 1


def test_what_another_user_could_have_written_is_no_pass(directory: Path) -> None:
    file = directory / "passes.json"
    assert passes.recent(directory, at(130), 60, owner=US + 1) == []
    file.chmod(0o666)
    assert lately(directory) == []
    file.chmod(0o644)
    directory.chmod(0o777)
    assert lately(directory) == []


@pytest.mark.parametrize("other", ["passes.json", "fault.json"])
def test_links_pipes_and_nonsense_are_no_pass(directory: Path, other: str) -> None:
    file = directory / other
    file.unlink(missing_ok=True)
    file.symlink_to("/proc/version")
    assert lately(directory) == []
    file.unlink()
    os.mkfifo(file)
    assert lately(directory) == []
    file.unlink()
    file.write_text("[[[[")
    assert lately(directory) == []


def test_a_directory_of_others_is_not_written_to(directory: Path) -> None:
    directory.chmod(0o777)
    passes.add(directory, passed(110))
    directory.chmod(0o755)
    assert lately(directory) == [passed()]


def test_a_pass_of_no_check_is_none(tmp_path: Path) -> None:
    passes.add(tmp_path / "passes", passed(checks=frozenset()))
    assert not [*tmp_path.iterdir()]


def test_of_many_kinds_of_passes_the_newest_are_kept(directory: Path) -> None:
    for number in range(40):
        passes.add(directory, passed(101, expected={"SLURM_JOB_GPUS": str(number)}))
    kept = [each.expected["SLURM_JOB_GPUS"] for each in lately(directory)]
    assert kept == [str(number) for number in range(39, 23, -1)]
    assert len({*kept}) == 16


# --- the prolog -----------------------------------------------------------------------------------


@pytest.fixture
def node(node: Node) -> Node:
    """One that a prolog has just checked, and found well."""
    node.passed_min = 5
    assert not node.prolog()
    return node


def is_checked(node: Node, *, gpus: str | None = None) -> bool:
    """Tell whether a prolog looks at the node, by a fault that it would find."""
    node.break_it()
    try:
        return node.prolog() if gpus is None else node.prolog(SLURM_JOB_GPUS=gpus)
    finally:
        node.mend()


def test_a_node_that_has_passed_is_let_off_for_a_while(node: Node) -> None:
    node.wait(4.9)
    assert not is_checked(node)
    node.wait(0.2)
    assert is_checked(node)


def test_without_the_setting_every_job_has_its_node_checked(node: Node) -> None:
    node.passed_min = 0
    assert is_checked(node)


def test_it_counts_from_the_check_and_not_from_who_was_let_off(node: Node) -> None:
    node.wait(4)
    assert not node.prolog()
    node.wait(4)
    assert is_checked(node)


def test_another_file_of_the_site_means_other_checks(node: Node) -> None:
    node.more = "[checks.swap]\n"
    assert is_checked(node)


def test_other_gpus_are_another_check(node: Node) -> None:
    assert not node.prolog(SLURM_JOB_GPUS="0")
    assert not is_checked(node, gpus="0")
    assert is_checked(node, gpus="1")


def test_a_fault_that_the_health_check_finds_ends_it(node: Node) -> None:
    node.wait(1)
    node.break_it()
    assert node.healthcheck()
    node.mend()
    assert is_checked(node)


def test_a_health_check_that_passes_does_not_stand_for_a_prolog(node: Node) -> None:
    node.wait(6)
    assert not node.healthcheck()
    assert is_checked(node)


@pytest.mark.parametrize("more", ["severity='warn'", "shadow=true"])
def test_whatever_is_not_a_pass_has_the_next_job_checked(node: Node, more: str) -> None:
    node.more = f"[checks.low]\ncheck='memory'\nmin_total_gib=9999\n{more}\n"
    for _ in range(2):
        assert not node.prolog()
        assert "check=low" in node.said


def test_an_accusation_has_the_node_checked(node: Node, story: Story) -> None:
    node.prolog()
    assert not is_checked(node)
    node.wait(1)
    story.write(journal())
    story.ended()
    assert "accuses this node" in node.said
    assert is_checked(node)
