# SPDX-License-Identifier: Apache-2.0
"""Which journals may go: by their age and by how much they take, and never of a job that lives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec

# Between its start and its end a job's script writes nothing to its journal. Where nobody can say
# whether a job lives, what was written within this time is left: Slurm jobs run for weeks.
UNASKED_S = 60 * 86400.0
# A check without Slurm, `check --local`, writes at least this often.
LOCAL_S = 3600.0
_AGE = re.compile(r"([0-9]{1,6})\s*(h|d|w)", re.ASCII)
_AGES = {"h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([KMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class JobJournal(msgspec.Struct, frozen=True, kw_only=True):
    """A job's journal: whose, what it takes on disk, and when it was last written."""

    cluster: str
    job: str
    uid: int
    size_bytes: int
    written_s: float


class Left(StrEnum):
    """Why a journal is left though a limit says that it may go."""

    ALIVE = "its job has not ended"
    UNASKED = "Slurm cannot be asked about its job, and it is younger than 60 days"
    LOCAL = "its check may still run"


class Cleaning(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, the oldest first, and what is left against the limits, and why."""

    remove: tuple[JobJournal, ...] = ()
    left: dict[Left, tuple[JobJournal, ...]] = {}


@dataclass(frozen=True, kw_only=True)
class KnownJobs:
    """What is known of which jobs have ended.

    Args:
        alive: the jobs that have not, by cluster and id.
        asked: the clusters whose Slurm has said which of its jobs live.
        local: the cluster of checks without Slurm.
    """

    alive: Collection[tuple[str, str]]
    asked: Collection[str]
    local: str


def choose(
    journals: Collection[JobJournal],
    jobs: KnownJobs,
    *,
    now_s: float,
    older_than_s: float | None,
    most_bytes: int | None,
    user_of: Callable[[int], int] = int,
) -> Cleaning:
    """Return which journals go.

    Args:
        journals: all there are.
        jobs: which jobs have ended.
        now_s: the time.
        older_than_s: what was last written longer ago goes; None: age is no reason.
        most_bytes: of what is left then, the oldest go until no more than this is taken: of those
            users who take more than an equal share leaves them, so that none is the others' loss.
        user_of: the user that an id is of, who may have several.
    """
    removed: list[JobJournal] = []
    left: dict[Left, list[JobJournal]] = {}
    in_order = sorted(journals, key=lambda each: (each.written_s, each.cluster, each.job))

    def goes(each: JobJournal) -> bool:
        why = _why_left(each, now_s - each.written_s, jobs)
        if why is not None:
            left.setdefault(why, []).append(each)
            return False
        removed.append(each)
        return True

    young: list[JobJournal] = []
    taken_bytes: dict[int, int] = {}
    for each in in_order:
        old = older_than_s is not None and now_s - each.written_s > older_than_s
        if old and goes(each):
            continue
        user = user_of(each.uid)
        taken_bytes[user] = taken_bytes.get(user, 0) + each.size_bytes
        if not old:
            young.append(each)
    share_bytes = inf if most_bytes is None else _share_bytes(taken_bytes.values(), most_bytes)
    for each in young:
        user = user_of(each.uid)
        if taken_bytes[user] > share_bytes and goes(each):
            taken_bytes[user] -= each.size_bytes
    return Cleaning(remove=tuple(removed), left={why: tuple(found) for why, found in left.items()})


def _share_bytes(taken_bytes: Iterable[int], most_bytes: int) -> float:
    """Return how much each user may keep so that all together take no more than `most_bytes`.

    Who takes less than an equal share leaves the rest of it to the others.
    """
    left_bytes = most_bytes
    in_order = sorted(taken_bytes)
    for count, taken in zip(range(len(in_order), 0, -1), in_order, strict=True):
        if taken * count > left_bytes:
            return left_bytes / count
        left_bytes -= taken
    return inf


def _why_left(journal: JobJournal, age_s: float, jobs: KnownJobs) -> Left | None:
    # A journal beside one whose name another user has taken is called `12.` and more.
    if (journal.cluster, journal.job.partition(".")[0]) in jobs.alive:
        return Left.ALIVE
    if journal.cluster == jobs.local:
        return Left.LOCAL if age_s < LOCAL_S else None
    return Left.UNASKED if journal.cluster not in jobs.asked and age_s < UNASKED_S else None


def age_s(text: str) -> float:
    """Return the seconds that `12h`, `90d` or `4w` stand for.

    Raises:
        ValueError: the text is none of these.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected an age as 12h, 90d or 4w, found {text!r}")
    return float(int(found[1]) * _AGES[found[2]])


def size_bytes(text: str) -> int:
    """Return the bytes that `500MB` (10⁶) or `20GiB` (2³⁰) stand for.

    Raises:
        ValueError: the text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a size as 500MB or 20GiB, found {text!r}")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _POWERS[found[2].upper()])


def size_text(count: int) -> str:
    """Return a size as a person says it: 34 MB."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def total_bytes(journals: Sequence[JobJournal]) -> int:
    """Return what journals take together."""
    return sum(each.size_bytes for each in journals)
