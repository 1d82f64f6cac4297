# SPDX-License-Identifier: Apache-2.0
"""Which journals may go: by their age, and never of a job that lives."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

# Between its start and its end a job's script writes nothing to its journal. Where nobody can say
# whether a job lives, what was written within this time is left: Slurm jobs run for weeks.
UNASKED_S = 60 * 86400.0
# A check without Slurm, `check --local`, writes at least this often.
LOCAL_S = 3600.0
_AGE = re.compile(r"([0-9]{1,6})\s*(h|d|w)", re.ASCII)
_AGES = {"h": 3600, "d": 86400, "w": 7 * 86400}


class JobJournal(msgspec.Struct, frozen=True, kw_only=True):
    """A job's journal: whose, what it takes on disk, and when it was last written."""

    cluster: str
    job: str
    uid: int
    size_bytes: int
    written_s: float


class Left(StrEnum):
    """Why a journal is left though it is older."""

    ALIVE = "its job has not ended"
    UNASKED = "Slurm cannot be asked about its job, and it is younger than 60 days"
    LOCAL = "its check may still run"


class Cleaning(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, the oldest first, and what is left though it is older, and why."""

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
    journals: Collection[JobJournal], jobs: KnownJobs, *, now_s: float, older_than_s: float
) -> Cleaning:
    """Return which journals go: those last written longer ago, of jobs that have ended.

    Args:
        journals: all there are.
        jobs: which jobs have ended.
        now_s: the time.
        older_than_s: the age beyond which a journal goes.
    """
    removed: list[JobJournal] = []
    left: dict[Left, list[JobJournal]] = {}
    for journal in sorted(journals, key=lambda each: (each.written_s, each.cluster, each.job)):
        age = now_s - journal.written_s
        if age <= older_than_s:
            continue
        why = _why_left(journal, age, jobs)
        if why is None:
            removed.append(journal)
        else:
            left.setdefault(why, []).append(journal)
    return Cleaning(remove=tuple(removed), left={why: tuple(kept) for why, kept in left.items()})


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


def size_text(count: int) -> str:
    """Return a size as a person says it: 34 MB."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def total_bytes(journals: Sequence[JobJournal]) -> int:
    """Return what journals take together."""
    return sum(each.size_bytes for each in journals)
