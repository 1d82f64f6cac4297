# SPDX-License-Identifier: Apache-2.0
"""Simulated trainings that say nothing, as the processes of one node show them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from slurm_health.training.diagnosis.by_movement import Judged, Movement
from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import BrokenPath, Frame
from slurm_health.training.diagnosis.watched import Looked, WatchedPrograms

NODES = ["n1", "n2"]
COLLECTIVE = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce"),)
OWN_CODE = (Frame("server.py", 7, "serve"),)
WINDOW_S = 10.0


class Job:
    """Two ranks on the first node and one on the second; `works` tells when they train."""

    def __init__(self, works: Callable[[float], bool], looks_every_s: float = 5.0) -> None:
        self.movement = Movement()
        self.now_s = 1000.0
        self.began_s = self.now_s
        self._works, self._every_s = works, looks_every_s
        self._now = {
            rank: RankNow("0", rank, 100 + rank, "S", 1.0, 0, world=3) for rank in range(3)
        }

    def pass_time(self, for_s: float) -> list[float]:
        """Look for so long; return the ages of the rest at which all nodes would be looked at."""
        suspected = []
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self._get_on(self._every_s)
            self.movement.take([self._now[0], self._now[1]], self.now_s)
            if self.movement.suspect(self.now_s):
                suspected.append(self.movement.stalled_s(self.now_s))
        return suspected

    def change(self, rank: int, **what: object) -> None:
        self._now[rank] = msgspec.structs.replace(self._now[rank], **what)

    def judge(
        self, paths: tuple[BrokenPath, ...] = (), looks: dict[int, RankLook] | None = None
    ) -> Judged:
        """Look at all nodes, twice."""
        watched = WatchedPrograms(NODES)
        self._hear(watched)
        before = {("0", rank): now for rank, now in self._now.items()}
        self._get_on(WINDOW_S)
        self._hear(watched)
        told = looks or {rank: look(rank) for rank in range(3)}
        seen = {("0", rank): each for rank, each in told.items()}
        looked = Looked(before=before, looks=seen, paths=paths)
        return self.movement.judge(watched, looked, NODES, window_s=WINDOW_S, now_s=self.now_s)

    def _hear(self, watched: WatchedPrograms) -> None:
        watched.hear("n1", [self._now[0], self._now[1]], self.now_s)
        watched.hear("n2", [self._now[2]], self.now_s)

    def _get_on(self, for_s: float) -> None:
        self.now_s += for_s
        if self._works(self.now_s - self.began_s):
            for rank, now in self._now.items():
                self.change(rank, ran_s=now.ran_s + 0.3 * for_s, wakes=now.wakes + int(9 * for_s))


def look(rank: int, stack: tuple[Frame, ...] = COLLECTIVE) -> RankLook:
    return RankLook("0", rank, False, "futex", stack)


def until(end_s: float) -> Callable[[float], bool]:
    return lambda at_s: at_s <= end_s


def test_ranks_that_come_to_rest_are_looked_at_within_three_quarters_of_a_minute() -> None:
    job = Job(until(100.0))

    suspected = job.pass_time(160.0)

    assert 40.0 <= suspected[0] <= 45.0


def test_a_rank_that_waits_while_others_stand_in_a_collective_is_told_of() -> None:
    job = Job(until(100.0))
    job.pass_time(145.0)

    assert not isinstance(job.judge(looks={0: look(0), 1: look(1), 2: look(2, OWN_CODE)}), str)


def test_ranks_of_which_none_is_known_to_wait_for_another_are_a_service() -> None:
    job = Job(until(100.0))
    job.pass_time(145.0)

    judged = job.judge(looks={rank: look(rank, OWN_CODE) for rank in range(3)})

    assert judged == "no rank is known to wait for another"


@pytest.mark.parametrize(("peer", "is_hang"), [("n2", True), ("192.0.2.7", False)])
def test_data_that_nobody_answers_counts_between_nodes_of_the_job_alone(
    peer: str, is_hang: bool
) -> None:
    job = Job(until(100.0))
    job.pass_time(145.0)
    paths = (BrokenPath(node="n1", peer=peer, retransmits=6),)

    judged = job.judge(paths, {rank: look(rank, OWN_CODE) for rank in range(3)})

    assert isinstance(judged, str) != is_hang


def test_a_rank_elsewhere_that_still_runs_a_little_is_no_hang() -> None:
    job = Job(until(100.0))
    job.pass_time(145.0)
    # Every few seconds, for some milliseconds: less than what counts as work.
    watched = WatchedPrograms(NODES)
    for rank in range(3):
        watched.hear(NODES[rank // 2], [RankNow("0", rank, 9, "S", 1.0, 0)], job.now_s)
    before = {("0", rank): RankNow("0", rank, 9, "S", 1.0, 0) for rank in range(3)}
    runs = RankNow("0", 2, 9, "S", 1.02, 0, ran_s=0.03, wakes=12)
    watched.hear("n2", [runs], job.now_s)
    looked = Looked(before=before, looks={("0", rank): look(rank) for rank in range(3)})

    judged = job.movement.judge(watched, looked, NODES, window_s=WINDOW_S, now_s=job.now_s)

    assert judged == "rank 2 on n2 still runs"


@pytest.mark.parametrize("rest_s", [30.0, 60.0, 300.0])
def test_rests_as_long_as_earlier_ones_are_usual(rest_s: float) -> None:
    job = Job(lambda at_s: at_s % (rest_s + 60.0) < 60.0)
    job.pass_time(2 * (rest_s + 60.0))

    assert job.pass_time(5 * (rest_s + 60.0)) == []


def test_ranks_that_have_not_even_loaded_their_libraries_are_not_looked_at() -> None:
    assert Job(until(9.0)).pass_time(900.0) == []


def test_before_ranks_have_moved_for_a_while_only_what_no_start_explains_is_told_of() -> None:
    job = Job(until(20.0))

    assert 60.0 <= job.pass_time(90.0)[0] <= 65.0
    assert isinstance(job.judge(), str)  # they wait in a collective, as for one that compiles
    job.change(2, state="T")
    assert not isinstance(job.judge(), str)


def test_a_job_that_was_suspended_has_not_rested() -> None:
    job = Job(until(100.0))
    job.pass_time(110.0)
    job.now_s += 3600.0
    job.movement.sleep(3600.0)

    assert job.pass_time(20.0) == []


def test_main_threads_that_do_not_get_a_processor_are_not_at_rest() -> None:
    job = Job(until(100.0))
    job.pass_time(100.0)
    for turn in range(20):
        for rank in range(2):
            job.change(rank, unserved_s=2.0 * turn)
        assert job.pass_time(5.0) == []


def test_main_threads_that_spin_and_never_wait_are_at_rest() -> None:
    job = Job(until(100.0))
    job.pass_time(100.0)
    for _ in range(10):
        for rank in range(2):
            job.change(rank, ran_s=job.now_s, cpu_s=job.now_s)
        job.pass_time(5.0)

    assert job.movement.suspect(job.now_s)


def test_ranks_that_read_or_write_are_not_at_rest() -> None:
    job = Job(until(100.0))
    job.pass_time(100.0)
    for turn in range(20):
        job.change(0, io_bytes=turn << 20)
        assert job.pass_time(5.0) == []


def test_a_look_that_shows_work_puts_the_next_one_off_longer_and_longer() -> None:
    job = Job(until(100.0))
    at_s = []
    for _ in range(80):
        if job.pass_time(5.0):
            at_s.append(job.now_s)
            job.movement.not_now(job.now_s)

    assert [round(later - at_s[0]) for later in at_s] == [0, 15, 45, 105, 225]


def test_ranks_that_rest_in_their_start_in_a_collective_hang_once_nothing_has_moved_for_long() -> (
    None
):
    job = Job(until(20.0))
    told_s = [
        job.now_s - job.began_s - 20.0
        for _ in range(60)
        if job.pass_time(5.0) and not isinstance(job.judge(), str)
    ]

    assert len(told_s) == 1
    assert 120.0 <= told_s[0] <= 240.0


def test_a_rank_elsewhere_that_moves_between_the_looks_keeps_a_start_going() -> None:
    job = Job(until(20.0))
    for turn in range(200):
        job.change(2, cpu_s=2.0 * turn)
        if job.pass_time(5.0):
            assert isinstance(job.judge(), str)
