# SPDX-License-Identifier: Apache-2.0
"""Which rank is behind by NCCL's own count, or does not answer NCCL (RAS)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from slurm_health.records.script_records import MOST_LINES, NEVER_ENTERED
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.diagnosis.samples import RankSample, Standstill
from slurm_health.training.framework import DataManager, Inference, Sureness

_MOST_RANKS = 65_536


class RasRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a communicator, as NCCL tells it; counts are of collectives launched so far."""

    rank: int
    host: str = ""
    pid: int = 0
    nvml_dev: int = -1
    collective_counts: dict[str, int] = {}

    @property
    def launched(self) -> int:
        """All collectives that it has launched."""
        return sum(self.collective_counts.values())

    @property
    def process(self) -> tuple[str, int, int]:
        """What it has in all of its communicators; in containers process numbers repeat."""
        return self.host, self.pid, self.nvml_dev


class MissingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing is known of a rank."""

    unresponsive: bool = False
    considered_dead: bool = False


class MissingRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that NCCL did not reach."""

    rank: int
    host: str = ""
    pid: int = 0
    status: MissingStatus = MissingStatus()


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator; ranks are counted within it."""

    hash: str = ""
    size: int = 0
    ranks: tuple[RasRank, ...] = ()
    missing_ranks: tuple[MissingRank, ...] = ()


class RasStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All communicators of the job."""

    communicators: tuple[Communicator, ...] = ()


# Of NCCL's RAS as text: `#0-0 (fa93daea854b060b) MISMATCH`, `30 ranks have launched up to operation
# 640`, `Rank 12 -- GPU 4 managed by process 323032 on node 10.0.0.124`
_REPORTED = re.compile(r"^#\d+-\d+ \((?P<hash>[0-9a-f]{1,32})\)")
_LAUNCHED = re.compile(
    r"^\s+(?P<ranks>\d+) ranks? ha(?:s|ve) launched up to operation (?P<count>\d+)"
)
_RANK = re.compile(
    r"^\s+Rank (?P<rank>\d+) -- GPU (?P<gpu>\d+) managed by process (?P<pid>\d+)"
    r" on node (?P<node>\S+)"
)


def read_report(text: str) -> RasStatus:
    """Return what NCCL's RAS tells as text of communicators whose ranks differ.

    It names the ranks of the last, smallest count, and only counts the others: these get numbers
    that no named one has.
    """
    communicators = []
    for block in re.split(r"^(?=#\d+-\d+ \()", text, flags=re.MULTILINE)[1:]:
        header = _REPORTED.match(block)
        lines = block.splitlines()[1:]
        counts = [(int(m["count"]), int(m["ranks"])) for m in map(_LAUNCHED.match, lines) if m]
        named = [match for match in map(_RANK.match, lines) if match]
        if header is None or len(counts) < 2 or sum(n for _, n in counts) > _MOST_RANKS:
            continue
        count = min(counts, key=lambda each: each[1])[0]
        ranks = [
            RasRank(
                rank=int(match["rank"]),
                host=match["node"],
                pid=int(match["pid"]),
                nvml_dev=int(match["gpu"]),
                collective_counts={"all": count},
            )
            for match in named
        ]
        taken = {rank.rank for rank in ranks}
        free = (n for n in range(_MOST_RANKS) if n not in taken)
        ranks += [
            RasRank(rank=number, pid=-1 - number, collective_counts={"all": other})
            for other, many in counts
            if other != count
            for number, _ in zip(free, range(many), strict=False)
        ]
        communicators.append(Communicator(hash=header["hash"], size=len(ranks), ranks=tuple(ranks)))
    return RasStatus(communicators=tuple(communicators))


def ras_behind(_: Inference, data: DataManager) -> Inference | None:
    """Some ranks of a communicator have launched fewer collectives, or do not answer NCCL.

    The Flight Recorder knows more.
    """
    status, flight = data.get(RasStatus), data.get(FlightRecords)
    told = flight is not None and CollectiveState(flight.records).difference is not None
    if status is None or told:
        return None
    by_size = sorted(status.communicators, key=lambda one: -one.size)
    for each in by_size:
        if found := _unanswering(each, data):
            return found
    return _behind(by_size, data)


def _unanswering(communicator: Communicator, data: DataManager) -> Inference | None:
    missing = [
        each
        for each in communicator.missing_ranks
        if each.status.unresponsive or each.status.considered_dead
    ]
    if not missing or len(missing) >= communicator.size:
        return None
    ranks = _ranks(missing, communicator, data)
    return Inference(
        name="rank-unresponsive",
        description=f"{_who(missing, ranks)} {'does' if len(missing) == 1 else 'do'} not answer"
        " NCCL, and the others do",
        sureness=Sureness.LIKELY,
        nodes=_nodes(ranks, data),
        ranks=ranks,
        evidence=tuple(
            f"NCCL RAS: rank {each.rank} of communicator {communicator.hash}, process {each.pid} on"
            f" {each.host}: {'considered dead' if each.status.considered_dead else 'unresponsive'}"
            for each in missing[:MOST_LINES]
        ),
        advice="check whether its process runs there, and whether the network to its node does",
    )


def _behind(communicators: Sequence[Communicator], data: DataManager) -> Inference | None:
    """Tell who is behind in any of the communicators and waits in none of them.

    Who is ahead in one of them waits there, though it be behind in another. Where several are left,
    as of the stages of a pipeline, any of these may be what the others wait for.
    """
    waiting = {
        rank.process
        for each in communicators
        for rank in each.ranks
        if _late(each) and rank.launched == _most(each)
    }
    left = [
        (each, found)
        for each in communicators
        if (found := [rank for rank in _late(each) if rank.process not in waiting])
    ]
    if not left:
        return None
    one = len({frozenset(rank.process for rank in found) for _, found in left}) == 1
    late = [(each, rank) for each, found in left for rank in found]
    told = [_ranks([rank], each, data) for each, rank in late]
    ranks = tuple(sorted({rank for some in told for rank in some})) if all(told) else ()
    behind = {rank.process: rank for _, rank in late}
    have = "has" if len(behind) == 1 else "have"
    which = "" if one else "; which of them holds up all is not told"
    return Inference(
        name=NEVER_ENTERED,
        description=f"{_who(list(behind.values()), ranks)} {have} launched fewer collectives than"
        f" the others, which wait{which}",
        sureness=Sureness.LIKELY if one else Sureness.POSSIBLE,
        nodes=_nodes(ranks, data),
        ranks=ranks,
        evidence=tuple(
            f"NCCL RAS: rank {rank.rank} of communicator {each.hash} on {rank.host} has"
            f" launched {rank.launched} collectives, others {_most(each)}"
            for each, rank in late[:MOST_LINES]
        ),
        advice="look at what it does instead: the data loader, a filesystem, a GPU",
    )


def _late(communicator: Communicator) -> list[RasRank]:
    """Return the ranks that launched fewer, unless most did: who is ahead is then the odd one."""
    late = [each for each in communicator.ranks if each.launched < _most(communicator)]
    return late if len(late) <= len(communicator.ranks) // 2 else []


def _most(communicator: Communicator) -> int:
    return max((each.launched for each in communicator.ranks), default=0)


def _ranks(
    told: Sequence[RasRank | MissingRank], communicator: Communicator, data: DataManager
) -> tuple[int, ...]:
    """Return the training's numbers of ranks: by their processes, or where all are in it."""
    seen = _seen(data)
    pids = Counter(each.pid for each in seen)  # two nodes may have the same
    by_pid = {each.pid: each.rank for each in seen if pids[each.pid] == 1}
    if all(each.pid in by_pid for each in told):
        return tuple(sorted(by_pid[each.pid] for each in told))
    whole = communicator.size == len(seen)
    return tuple(sorted(each.rank for each in told)) if whole else ()


def _nodes(ranks: Sequence[int], data: DataManager) -> tuple[str, ...]:
    return tuple(sorted({each.node for each in _seen(data) if each.rank in ranks and each.node}))


def _seen(data: DataManager) -> tuple[RankSample, ...]:
    found = data.get(Standstill)
    return found.ranks if found else ()


def _who(told: Sequence[RasRank | MissingRank], ranks: tuple[int, ...]) -> str:
    hosts = sorted({each.host for each in told})
    what = ranks_text(ranks) if ranks else "a rank"
    return f"{what} on {listed(hosts)}"
