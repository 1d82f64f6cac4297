# SPDX-License-Identifier: Apache-2.0
"""What a user writes into their own journals steers no fleet: times, nodes, and many jobs."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from slurm_health.fleet import answers
from slurm_health.fleet.index import MOST_JOBS_OF_USER, Index, bring_up_to_date, opened
from slurm_health.fleet.observation import Observation, Signal
from slurm_health.fleet.reading import (
    MOST_RUNS,
    CheckReading,
    JobReading,
)
from slurm_health.records.records import Sampled
from slurm_health.records.standings import Reliability
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.accounts import Accounts
from tests.fleet.test_index import give
from tests.support.command_line import slurm_health
from tests.support.hooked_slurm import HookedSlurm
from tests.support.journals import Clock, RunJournal, write_healthy_run
from tests.support.rows import rows

DAY_S = 86400.0
NOW_S = 1_700_100_000.0
ALICE, BOB = 1001, 1002


class Fleet:
    """An index of jobs of several users, as their journals were read."""

    def __init__(self) -> None:
        self.index = Index(None)
        self.jobs = 0

    def ran(
        self,
        uid: int,
        nodes: Collection[str],
        *,
        bad: str = "",
        time_s: float = NOW_S,
        level: Level = Level.HEALTHY,
    ) -> None:
        """Let a user have one job on some nodes, of which one may be called slow."""
        self.jobs += 1
        seen = tuple(
            Observation(
                node=node,
                level=Level.SLOW if node == bad else level,
                signals=(Signal.SLOW,) if node == bad else (),
            )
            for node in nodes
        )
        check = CheckReading(label="0", time_s=time_s, nodes=seen)
        job = JobReading(uid=uid, final_s=0.0, checks=(check,))
        self.index.keep("lab", str(self.jobs), job, now_s=NOW_S)

    def standings(
        self, known: Mapping[str, Collection[str]] | None = None
    ) -> answers.ClusterStandings:
        (found,) = answers.lemons(self.index, now_s=NOW_S, known=known or {})
        return found

    def level(self, node: str) -> Reliability:
        """Return the conclusion about a node."""
        return next(each.level for each in self.standings().nodes if each.node == node)


@pytest.fixture
def fleet() -> Fleet:
    """A fleet on which Alice has had twenty jobs that were well."""
    found = Fleet()
    for number in range(20):
        found.ran(ALICE, ("n1", "n2", "n3"), time_s=NOW_S - number * DAY_S / 4)
    return found


def accuse(fleet: Fleet, uid: int, node: str = "n3", jobs: int = 12) -> None:
    """Let a user call a node slow in many jobs, on as many days."""
    for number in range(jobs):
        fleet.ran(uid, ("n1", "n2", node), bad=node, time_s=NOW_S - number * DAY_S)


@pytest.mark.parametrize(
    ("others", "accusers", "found"),
    [
        ([(Level.HEALTHY, 300)], {BOB: 12}, Reliability.SUSPECT),
        ([(Level.INCONCLUSIVE, 0)], {BOB: 12}, Reliability.SUSPECT),
        ([], {BOB: 12}, Reliability.LEMON),  # a cluster of one account keeps its lemons
        (
            [(Level.HEALTHY, number / 4) for number in range(20)],
            {BOB: 6, ALICE: 6},
            Reliability.LEMON,
        ),
    ],
)
def test_one_users_word_makes_no_lemon_where_another_has_ever_been(
    others: list[tuple[Level, float]], accusers: dict[int, int], found: Reliability
) -> None:
    fleet = Fleet()
    for level, days_ago in others:
        fleet.ran(ALICE, ("n1", "n2", "n3"), time_s=NOW_S - days_ago * DAY_S, level=level)
        fleet.ran(ALICE, ("n1", "n2"))
    for uid, jobs in accusers.items():
        accuse(fleet, uid, jobs=jobs)
    assert fleet.level("n3") is found


def test_a_thousand_healthy_jobs_of_one_user_do_not_hide_what_others_met(fleet: Fleet) -> None:
    accuse(fleet, ALICE, jobs=12)
    accuse(fleet, BOB, jobs=2)
    for number in range(10 * MOST_JOBS_OF_USER):
        fleet.ran(BOB, ("n3",), time_s=NOW_S - 5 * DAY_S - number)
    (bad,) = [each for each in fleet.standings().nodes if each.node == "n3"]
    assert bad.jobs == 32 + MOST_JOBS_OF_USER
    assert bad.level is Reliability.LEMON

    latest = Fleet()  # of too many jobs of one user these count
    latest.ran(ALICE, ("n3",))
    accuse(latest, BOB, jobs=4)
    for number in range(MOST_JOBS_OF_USER):
        latest.ran(BOB, ("n3",), time_s=NOW_S - number)
    (node,) = [each for each in latest.standings().nodes if each.node == "n3"]
    assert (node.jobs, node.spoiled) == (1 + MOST_JOBS_OF_USER, 1)


def test_nodes_that_slurm_does_not_know_are_left_out(fleet: Fleet) -> None:
    invented = [f"evil{number}" for number in range(3000)]
    fleet.ran(BOB, invented)
    known = {"lab": frozenset({"n1", "n2", "n3"})}
    found = fleet.standings(known)
    assert {each.node for each in found.nodes} == known["lab"]
    assert found.left_out == 3000


def test_the_history_of_a_node_that_slurm_has_no_more_counts_its_jobs(fleet: Fleet) -> None:
    accuse(fleet, BOB, jobs=2)
    known = {"lab": frozenset({"n1", "n2"})}
    both = answers.histories(fleet.index, "n[1,3]", now_s=NOW_S, known=known)
    still, gone = (each.standing for each in both)
    assert (gone.jobs, gone.spoiled, gone.level) == (22, 2, Reliability.SUSPECT)
    assert still.elsewhere_jobs == still.jobs  # those of n2, and not of the one that is gone


def test_where_slurm_cannot_be_asked_one_user_names_only_so_many(fleet: Fleet) -> None:
    fleet.ran(BOB, [f"evil{number}" for number in range(3000)])
    names = {each.node for each in fleet.standings().nodes}
    assert {"n1", "n2", "n3"} <= names
    assert len(names) == 3 + answers.MOST_NODES_OF_USER


def test_the_metrics_have_no_node_that_slurm_does_not_know(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    run = RunJournal(root, nodes=("n1", "n2", "evil"))
    run.pass_check()
    scontrol = HookedSlurm(tmp_path / "slurm", nodes=3)
    environ = {"PATH": scontrol.path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurm_health(
        "lemons", "--prometheus", f"--journal={root}", "--days=3650", environ=environ
    )
    assert done.code == 0, done
    assert 'node="n2"' in done.stdout
    assert "evil" not in done.stdout


@pytest.mark.parametrize("touched_s", [NOW_S - 3600, NOW_S + 400 * DAY_S])
def test_a_check_of_the_future_has_its_files_time(tmp_path: Path, touched_s: float) -> None:
    root = tmp_path / "journal"
    run = RunJournal(root, nodes=("n1", "n2"), clock=Clock(NOW_S + 300 * DAY_S))
    run.pass_check()
    for path in root.rglob("*.jsonl"):
        os.utime(path, (touched_s, touched_s))
    with opened(None, root, now_s=NOW_S) as found:
        assert found.last_verdicts("lab", uid=os.geteuid()) == {
            "n1": min(touched_s, NOW_S),
            "n2": min(touched_s, NOW_S),
        }


SWEEPER = 1003


@rows
def test_one_users_word_keeps_no_node_from_the_sweep(
    checks: list[tuple[int, float]], verdict_s: float
) -> None:
    fleet = Fleet()
    for uid, days_ago in checks:
        fleet.ran(uid, ("n1",), time_s=NOW_S - days_ago * DAY_S)

    assert fleet.index.last_verdicts("lab", uid=SWEEPER) == {"n1": verdict_s}


def test_figures_beyond_all_measure_are_left_out(tmp_path: Path) -> None:
    for job in (12, 13):
        run = RunJournal(tmp_path / "journal", job=job, nodes=("n1", "n2"), clock=Clock(NOW_S))
        run.start()
        for number in range(2):
            huge = Sampled(
                node="n1",
                round=number,
                group=["n1"],
                probe="x" * 1000,
                iteration_ms=[[1.7e308], [1.7e308]],
            )
            run.write("n1", huge)

    words = ("history", "n1", "--days=3650", "--json", f"--journal={tmp_path / 'journal'}")
    done = slurm_health(*words, environ={"XDG_CACHE_HOME": str(tmp_path)})

    assert done.code == 0, done.stderr
    (found,) = json.loads(done.stdout)["nodes"]
    assert len(found["checks"]) == 2
    assert found["figures"] == []


@pytest.mark.root
def test_a_user_with_many_ids_is_one_user(public_path: Path) -> None:
    (public_path / "subuid").write_text(f"{BOB}:100000:65536\n")
    (public_path / "lab").mkdir(parents=True)
    (public_path / "lab").chmod(0o1777)
    for job, uid in ((12, BOB), (13, 100_001), (14, 165_535)):
        give(write_healthy_run(public_path, job=job, nodes=("n1", "n2")).directory.parent, uid)

    index, accounts = Index(None), Accounts(public_path / "subuid")
    bring_up_to_date(index, public_path, now_s=NOW_S, accounts=accounts)

    assert index.only_users("lab") == {"n1": BOB, "n2": BOB}


def test_no_name_and_no_number_of_runs_of_a_user_ends_the_index(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    beside = write_healthy_run(root, job=14, nodes=("n1", "n2")).directory.parent
    beside.rename(beside.with_name("1234567890.0123456789abcdef"))
    for number in range(MOST_RUNS):
        run = root / "lab" / "13" / f"{10**8 + number}-{10**8 + number}"
        run.mkdir(mode=0o700, parents=True)
        for writer in (journal.MASTER, journal.SUPERVISOR, journal.POST_MORTEM):
            journal.path_of(run, writer).touch(mode=0o600)

    with opened(None, root, now_s=NOW_S) as index:
        (history,) = answers.histories(index, "n1", now_s=NOW_S, known={})

    assert sorted(check.job for check in history.checks) == ["12", "1234567890.0123456789abcdef"]
