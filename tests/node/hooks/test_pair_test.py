# SPDX-License-Identifier: Apache-2.0
"""An accused node that passes its own tests is tested with partners, where the site wants that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_health.node.draining import shared_state
from slurm_health.node.rules.accusations import Asked, NodeMark, refusal, with_asked
from slurm_health.node.rules.settings import PairTest
from slurm_health.records.verdict import Level
from tests.support.accusing import UID, Story, journal, judged

# Answers as sbatch --parsable does, and keeps what it was called with.
SBATCH = """\
#!/bin/sh
echo "$@" >>{directory}/submitted
cat >{directory}/script
count=$(wc -l <{directory}/submitted)
echo $((900 + count))
"""
TESTER = 900
HOUR_S = 3600.0


class PairStory(Story):
    """A site that has accused nodes tested with partners."""

    settings = ""

    @property
    def more(self) -> str:
        return f"{super().more}[pair_test]\nenabled = true\nagain_h = 1.0\n{self.settings}\n"

    def submitted(self) -> list[list[str]]:
        """The options of every test that was asked for."""
        path = self.root.parent / "submitted"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def marks(self) -> int:
        return len(shared_state.marks_of(self.node.site.breaker, "n3"))


@pytest.fixture
def tested(story: Story) -> PairStory:
    directory = story.root.parent
    program = story.node.slurm.bin / "sbatch"
    program.write_text(SBATCH.format(directory=directory))
    program.chmod(0o755)
    found = PairStory.__new__(PairStory)
    found.node, found.root = story.node, story.root
    return found


def accused(story: PairStory, job: int = 7, uid: int = UID) -> bool:
    story.write(journal(judged(component="network"), job=job), job=job, uid=uid)
    return story.ended(job, uid)


def test_a_node_that_its_own_tests_find_well_is_tested_with_two_partners(
    tested: PairStory,
) -> None:
    tested.settings = 'qos = "low"\naccount = "ops"\nsbatch = ["--gres=gpu:8"]\npython = "/opt/py"'
    assert not accused(tested)
    (options,) = tested.submitted()

    for each in ("--nodelist=n3", "--nodes=3", "--exclusive", "--nice=1000000", "--no-requeue"):
        assert each in options
    for each in ("--partition=gpu", "--qos=low", "--account=ops", "--gres=gpu:8"):
        assert each in options
    assert not any(each.startswith(("--uid", "--exclude")) for each in options)
    assert "check --python=/opt/py" in (tested.root.parent / "script").read_text()
    assert "job 901 tests it with partners" in tested.node.said
    assert tested.marks() == 1


def test_the_test_is_run_as_the_user_and_in_the_partition_that_the_site_names(
    tested: PairStory,
) -> None:
    tested.settings = 'user = "health"\npartition = "scavenger"'
    accused(tested)
    (options,) = tested.submitted()

    assert {"--uid=health", "--partition=scavenger"} <= set(options)


def test_partners_are_all_nodes_without_a_mark_that_counts(tested: PairStory) -> None:
    site, now_s = tested.node.site, tested.node.now_s
    for node, age_s in (("n8", HOUR_S), ("n9", 8 * 24 * HOUR_S), ("scrapped1", HOUR_S)):
        mark = NodeMark(job=1, uid=1, component="network", text="", time_s=now_s - age_s)
        shared_state.add_mark(site, node, mark)
    accused(tested)
    (options,) = tested.submitted()

    assert [each for each in options if each.startswith("--exclude")] == ["--exclude=n8"]


def test_a_node_that_the_test_finds_faulty_is_drained_for_what_the_test_found(
    tested: PairStory,
) -> None:
    accused(tested)
    bad = judged(component="network", reason="allgather failed with n8 and n9")
    tested.write(journal(bad, job=TESTER + 1), job=TESTER + 1)

    assert tested.ended(TESTER + 1)
    assert tested.node.state == "IDLE+DRAIN"
    assert "check=pair-test job=901" in tested.node.reason
    assert "allgather failed with n8" in tested.node.reason


def test_a_node_that_the_test_finds_healthy_loses_its_marks(tested: PairStory) -> None:
    accused(tested)
    well = judged(level=Level.HEALTHY)
    tested.write(journal(well, job=TESTER + 1), job=TESTER + 1)

    assert not tested.ended(TESTER + 1)
    assert tested.node.state == "IDLE"
    assert tested.marks() == 0


@pytest.mark.parametrize("level", [None, Level.INCONCLUSIVE, Level.SLOW])
def test_a_test_without_a_clear_verdict_neither_drains_nor_clears(
    tested: PairStory, level: Level | None
) -> None:
    accused(tested)
    if level is not None:
        found = judged(level=level)
        tested.write(journal(found, job=TESTER + 1), job=TESTER + 1)

    assert not tested.ended(TESTER + 1)
    assert tested.node.state == "IDLE"
    assert tested.marks() == 1


def test_a_job_that_is_no_test_is_a_users_word_whoever_runs_it(tested: PairStory) -> None:
    accused(tested)
    tested.write(journal(judged(component="network"), job=950), job=950)

    assert not tested.ended(950)
    assert tested.node.state == "IDLE"


@pytest.mark.root
def test_marks_of_many_users_drain_nothing_where_nodes_are_tested_with_partners(
    tested: PairStory,
) -> None:
    ended = [accused(tested, job, uid) for job, uid in ((10, 1), (11, 1), (12, 2))]

    assert ended == [False, False, False]
    assert tested.node.state == "IDLE"
    assert len(tested.submitted()) == 1
    assert "it was tested with partners within the last 1 h" in tested.node.said


def test_no_test_is_asked_for_unless_the_site_wants_it(story: Story, tested: PairStory) -> None:
    story.write(journal(judged(component="network")))

    assert not story.ended()
    assert tested.submitted() == []


def test_a_test_that_slurm_refuses_leaves_the_mark(tested: PairStory) -> None:
    (tested.node.slurm.bin / "sbatch").write_text("#!/bin/sh\necho invalid qos >&2\nexit 1\n")

    assert not accused(tested)
    assert "could not be tested with partners" in tested.node.said
    assert tested.marks() == 1


def asked(*tests: tuple[str, float, int]) -> Sequence[Asked]:
    return [Asked(node=node, time_s=time_s, uid=uid, accusing=1) for node, time_s, uid in tests]


@pytest.mark.parametrize(
    ("before", "refused"),
    [
        (asked(), ""),
        (asked(("n3", HOUR_S, 5)), "tested with partners within the last 6 h"),
        (asked(("n3", -6 * HOUR_S, 5)), ""),
        (
            asked(*((f"m{n}", HOUR_S, n + 10) for n in range(4))),
            "4 tests with partners within the hour",
        ),
        (asked(*((f"m{n}", 1.0, n + 10) for n in range(4))), ""),
        (asked(("m1", HOUR_S, 1), ("m2", HOUR_S, 1)), "jobs of user 1 have had 2 nodes tested"),
    ],
)
def test_tests_are_limited_per_node_per_hour_and_per_user(
    before: Sequence[Asked], refused: str
) -> None:
    (wanted,) = asked(("n3", 2 * HOUR_S - 1, 1))

    found = refusal(before, wanted, PairTest())
    assert (refused in found) if refused else found == ""


def test_a_test_is_kept_once_with_its_job() -> None:
    (wanted,) = asked(("n3", 1.0, 1))
    kept = with_asked(
        with_asked((), wanted), Asked(node="n3", time_s=1.0, uid=1, accusing=1, job=9)
    )

    assert [each.job for each in kept] == [9]


def test_the_directory_of_a_site_keeps_tests_for_root_alone(
    tested: PairStory, tmp_path: Path
) -> None:
    accused(tested)
    (path,) = tmp_path.rglob("pair-tests.json")

    assert path.stat().st_mode & 0o777 == 0o600
