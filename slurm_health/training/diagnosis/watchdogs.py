# SPDX-License-Identifier: Apache-2.0
"""The lines of NCCL's watchdogs before they end a process: why, and how far ranks came."""

from __future__ import annotations

import re

import msgspec

from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.collected import RankFailure
from slurm_health.training.diagnosis.collectives import FlightRecord, Reached
from slurm_health.training.diagnosis.ends import ABORTED
from slurm_health.training.diagnosis.words_of_launchers import is_consequence

_MOST_RANKS = 16_384
# [rank3]:[E1123 02:41:16.35 ProcessGroupNCCL.cpp:2174] [PG ID 0 PG GUID 0(default_pg) Rank 3] …
# The month has no leading zero; torch 2.2 has no time, and earlier releases no reliable rank: the
# number in brackets counts within its group.
_ENDED = re.compile(
    r"(?:\[[EF](?:\d{3,4} [\d:.]+)? ?ProcessGroupNCCL\.cpp:\d+\] .*?|^\[Rank \d+\] )"
    r"(?:watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?P<error>.+)"
    r"|(?P<timeout>Watchdog caught collective operation timeout: .+)"
    # Of the watchdog itself, by the thread that monitors it (TORCH_NCCL_ENABLE_MONITORING).
    r"|(?P<stuck>ProcessGroupNCCL's watchdog got stuck for \d+ seconds"
    r"|Terminating the process .{0,80}due to ProcessGroupNCCL watchdog hang)"
    r"|taking the entire process down|Received a dump signal due to a collective timeout)"
)
_NUMBER = re.compile(r"\[Rank (\d{1,6})\] ")
# … [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal … Last enqueued NCCL work: 17,
# last completed NCCL work: 17; and … failure detected by watchdog at work sequence id: 18 PG
# status: last enqueued work: 18, last started work: -1 (), last completed work: 17
_PROGRESS = re.compile(
    r"\[PG ID (?P<group>\d{1,9}) PG GUID [^\]]{1,200} Rank \d+\] .*?"
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d{1,15}),.{0,80}?"
    r"last completed (?:NCCL )?work: (?P<over>-?\d{1,15})"
)
# Its report with TORCH_NCCL_DESYNC_DEBUG=1, in lines of their own and by numbers of its group:
#  - [0] Timeout at collective: ALLREDUCE, #3
#    - [0] joined but didn't finish collective #3 (count from 1)
#      [1, 2] finished collective #2, but didn't join collective #3 (count from 1)
_DESYNC = re.compile(
    r"\s*(?:- )?\[(?P<ranks>\d{1,6}(?:, ?\d{1,6})*)\] "
    r"(?:Timeout at collective: \w{1,40}, #(?P<waits>\d{1,15})"
    r"|joined but didn't finish collective #(?P<inside>\d{1,15})"
    r"|finished collective #(?P<over>\d{1,15}), but didn't join)"
)
# Below it, `Snapshot of ranks' latest states:`
#   #315 started ranks:
#     [0, 1, 2] started ALLREDUCE
_SNAPSHOT = re.compile(r"\s*#(?P<number>\d{1,15}) (?P<what>started|finished) ranks:")
_IN_SNAPSHOT = re.compile(
    r"\s*\[(?P<ranks>\d{1,6}(?:, ?\d{1,6})*)\] (?:started|finished) \w{1,40}$"
)
_OF_A_SUBGROUP = re.compile(r"\[PG ID [1-9].{1,300}Watchdog caught")
_FAILED_OR_TIMED_OUT = "NCCL operations have failed or timed out"


class Watchdogs:
    """Reads the lines of NCCL's watchdogs.

    Attributes:
        ends: the ranks that their watchdog ended: it aborts the process, which is no crash.
        of_groups: before torch 2.2 a watchdog has its number in a group instead of its rank; in
            the group of all these are equal.
        has_subgroups: one wrote about a group of some ranks only, whose numbers differ.
    """

    def __init__(self) -> None:
        self.ends: dict[int | None, RankFailure] = {}
        self.of_groups: dict[int | None, RankFailure] = {}
        self.has_subgroups = False
        self._own: dict[int, Reached] = {}
        self._reported: dict[int, Reached] = {}  # by the watchdogs of others
        self._snapshot: tuple[int, bool] | None = None
        self._latest_over = 1 << 60  # of the ranks that a watchdog reports as behind

    def take(self, at: int, text: str, rank: int | None) -> bool:
        """Read a line; return whether it is a watchdog's."""
        if "ProcessGroupNCCL" in text or text.startswith("[Rank "):
            if rank is not None:
                self._progress(text, rank)
            self.has_subgroups |= _OF_A_SUBGROUP.search(text) is not None
            self._end(at, text, rank)
        elif " collective" in text and (reported := _DESYNC.match(text)):
            inside = int(reported["waits"] or reported["inside"] or -1)
            if inside < 0:
                self._latest_over = int(reported["over"])
                self._report(reported["ranks"], Reached(self._latest_over, self._latest_over))
            else:
                self._report(reported["ranks"], Reached(inside, inside - 1, (inside, inside)))
        elif snapshot := _SNAPSHOT.match(text):
            self._snapshot = int(snapshot["number"]), snapshot["what"] == "finished"
        elif self._snapshot and (listed := _IN_SNAPSHOT.match(text)):
            number, finished = self._snapshot
            # Many works may have started: the first one that is not over on any rank counts, and
            # it is behind the last finished one.
            over = number if finished else min(number - 1, self._latest_over)
            inside_of = None if finished else (over + 1, number)
            self._report(listed["ranks"], Reached(number, over, inside_of))
        else:
            return False
        return True

    def records(self) -> tuple[FlightRecord, ...]:
        """Return how far ranks came, by the source with more ranks: their numbers differ."""
        if self.has_subgroups:
            return ()
        records = []
        for rank, reached in sorted(max(self._own, self._reported, key=len).items()):
            came = f"last enqueued {reached.entered}, last completed {reached.over}"
            lines = (f"NCCL's watchdog of rank {rank}: {came}",)
            records.append(
                FlightRecord(rank=rank, reached={"0": reached}, whole=False, lines=lines)
            )
        return tuple(records)

    def merged(self, failures: list[RankFailure]) -> list[RankFailure]:
        """Return failures with the words of watchdogs, and those that only watchdogs show."""
        named = {failure.rank for failure in failures}
        # One without a rank adds nothing to processes whose failure is known.
        known = named or self.ends.keys() - {None}
        rest = [
            end
            for rank, end in self.ends.items()
            if rank not in named and not (rank is None and known)
        ]
        by_rank = {**self.of_groups, **self.ends}
        explained = list(failures)
        for index, end in enumerate(failures):
            watchdog = by_rank.get(end.rank) if end.rank is not None else None
            if watchdog and ABORTED in (end.signal, end.exit_code - 128) and not end.error:
                explained[index] = msgspec.structs.replace(
                    watchdog, rank=end.rank, node=end.node, signal=end.signal
                )
        return [*explained, *rest]

    def _end(self, at: int, text: str, rank: int | None) -> None:
        match = _ENDED.search(text)
        if match is None or len(self.ends) >= _MOST_RANKS:
            return
        written = match["error"] or match["timeout"] or match["stuck"]
        error = one_line(written)[:300] if written else _FAILED_OR_TIMED_OUT
        end = RankFailure(
            rank=rank,
            error=error,
            at=at,
            line=f"{f'rank {rank}' if rank is not None else 'a process'}: {error}",
            consequence=is_consequence(error),
        )
        number = _NUMBER.search(text) if written and rank is None else None
        if number and len(self.of_groups) < _MOST_RANKS:
            self.of_groups[int(number[1])] = end
        before = self.ends.get(rank)
        if before is None or (written and not before.error.startswith("Watchdog caught")):
            self.ends[rank] = end

    def _progress(self, text: str, rank: int) -> None:
        match = _PROGRESS.search(text)
        if match is None or len(self._own) >= _MOST_RANKS:
            return
        entered, over = int(match["entered"]), int(match["over"])
        if match["group"] != "0":
            # A rank that is behind in one of several groups may wait in another one.
            self.has_subgroups = True
        elif entered >= 0:
            inside = (over + 1, entered) if entered > over else None
            self._own[rank] = Reached(entered, over, inside)

    def _report(self, ranks: str, reached: Reached) -> None:
        for rank in map(int, ranks.split(",")):
            if len(self._reported) < _MOST_RANKS:
                self._reported[rank] = reached
