# SPDX-License-Identifier: Apache-2.0
"""NCCL's own report of its ranks (RAS): how far they came, and which do not answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import counted, listed, ranks_text
from slurm_health.training.diagnosis.collectives import STAND_IN, FlightRecord, Reached
from slurm_health.training.diagnosis.samples import RankSample, Standstill
from slurm_health.training.framework import DataManager, Inference, Sureness

_MOST_RANKS = 65_536


class RasRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a communicator; counts are of collectives launched so far."""

    rank: int
    host: str = ""
    pid: int = 0
    nvml_dev: int = -1
    collective_counts: dict[str, int] = {}

    @property
    def launched(self) -> int:
        """The number of all launched collectives."""
        return sum(self.collective_counts.values())


class MissingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank has no report."""

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


# NCCL's RAS as text: `#0-0 (fa93daea854b060b) MISMATCH`, `30 ranks have launched up to operation
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
    """Return the communicators whose ranks differ, by NCCL's RAS as text.

    It names the ranks of the last, smallest count, and only counts the others: these get unused
    numbers.
    """
    communicators = []
    for block in re.split(r"^(?=#\d+-\d+ \()", text, flags=re.MULTILINE)[1:]:
        header = _REPORTED.match(block)
        lines = block.splitlines()[1:]
        counts = [(int(m["count"]), int(m["ranks"])) for m in map(_LAUNCHED.match, lines) if m]
        named = [match for match in map(_RANK.match, lines) if match]
        if header is None or len(counts) < 2 or sum(n for _, n in counts) > _MOST_RANKS:
            continue
        count = min(counts, key=lambda pair: pair[1])[0]
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


def records_of(status: RasStatus, samples: Sequence[RankSample]) -> list[FlightRecord]:
    """Return how far ranks came in communicators in which some launched fewer than others.

    If most did, the one that is ahead is the odd one. A process is one rank in all communicators.
    """
    numbers = _Numbers(samples)
    records = []
    for communicator in status.communicators:
        most = max((rank.launched for rank in communicator.ranks), default=0)
        late = [rank for rank in communicator.ranks if rank.launched < most]
        if not late or len(late) > len(communicator.ranks) // 2:
            continue
        for rank in communicator.ranks:
            ahead = rank.launched == most
            line = (
                f"NCCL RAS: rank {rank.rank} of communicator {communicator.hash} on {rank.host} has"
                f" launched {rank.launched} collectives, others {most}"
            )
            reached = Reached(rank.launched, rank.launched - ahead, (most, most) if ahead else None)
            records.append(
                FlightRecord(
                    rank=numbers.of(rank, communicator),
                    reached={communicator.hash: reached},
                    whole=False,
                    host=rank.host,
                    lines=() if ahead else (line,),
                )
            )
    return records


def ranks_by_ras(_: Inference, data: DataManager) -> Inference | None:
    """Ranks do not answer NCCL, and others of their communicator do; or a few are ahead of most."""
    status, standstill = data.get(RasStatus), data.get(Standstill)
    samples = standstill.ranks if standstill else ()
    for communicator in sorted(status.communicators if status else (), key=lambda c: -c.size):
        missing = [
            rank
            for rank in communicator.missing_ranks
            if rank.status.unresponsive or rank.status.considered_dead
        ]
        if not missing or len(missing) >= communicator.size:
            continue
        numbers = [_Numbers(samples).of(rank, communicator) for rank in missing]
        ranks = tuple(sorted(number for number in numbers if number < STAND_IN))
        hosts = listed(sorted({rank.host for rank in missing}))
        return Inference(
            name="rank-unresponsive",
            description=f"{ranks_text(ranks) if ranks else 'a rank'} on {hosts}"
            f" {'does' if len(missing) == 1 else 'do'} not answer NCCL, while the others do",
            sureness=Sureness.LIKELY,
            nodes=tuple(
                sorted({rank.node for rank in samples if rank.rank in ranks and rank.node})
            ),
            ranks=ranks,
            evidence=tuple(
                f"NCCL RAS: rank {rank.rank} of communicator {communicator.hash}, process"
                f" {rank.pid} on {rank.host}:"
                f" {'considered dead' if rank.status.considered_dead else 'unresponsive'}"
                for rank in missing[:MOST_LINES]
            ),
            advice="check whether its process runs there, and whether its node can be reached",
        )
    return _most_behind(status)


def _most_behind(status: RasStatus | None) -> Inference | None:
    """Most ranks of a communicator are behind a few, which are not at fault for being ahead."""
    for communicator in sorted(status.communicators if status else (), key=lambda c: -c.size):
        counts = Counter(rank.launched for rank in communicator.ranks)
        most = max(counts, default=0)
        behind = sum(counts.values()) - counts[most]
        if behind <= counts[most]:
            continue
        ahead = [rank for rank in communicator.ranks if rank.launched == most and rank.host]
        return Inference(
            name="most-ranks-behind",
            description=f"{behind} of the {communicator.size} ranks of a communicator launched"
            f" fewer collectives than the other {counts[most]}, which are ahead and not at fault"
            " for it; the collected data does not show what most wait for",
            sureness=Sureness.POSSIBLE,
            evidence=(
                f"NCCL RAS: communicator {communicator.hash}: "
                + ", ".join(
                    f"{counted(ranks, 'rank')} launched {count}"
                    for count, ranks in sorted(counts.items())[:MOST_LINES]
                ),
                *(
                    f"NCCL RAS: rank {rank.rank} on {rank.host} is ahead"
                    for rank in ahead[: MOST_LINES - 1]
                ),
            ),
            advice="look at the stack of a rank that is behind (py-spy dump --pid PID)",
        )
    return None


class _Numbers:
    """The training's numbers of NCCL's ranks: by their processes, or by a communicator of all.

    Two nodes may have processes of one number, and containers repeat them.
    """

    def __init__(self, samples: Sequence[RankSample]) -> None:
        pids = Counter(rank.pid for rank in samples)
        self._by_pid = {rank.pid: rank.rank for rank in samples if pids[rank.pid] == 1}
        self._many = len(samples)
        self._stand_ins: dict[tuple[str, int, int], int] = {}

    def of(self, rank: RasRank | MissingRank, communicator: Communicator) -> int:
        """Return the number of a rank, a stand-in if it is unknown."""
        if (known := self._by_pid.get(rank.pid)) is not None:
            return known
        if communicator.size == self._many:
            return rank.rank
        process = rank.host, rank.pid, getattr(rank, "nvml_dev", -1)
        return self._stand_ins.setdefault(process, STAND_IN + len(self._stand_ins))
