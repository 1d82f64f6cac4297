# SPDX-License-Identifier: Apache-2.0
"""Accusations that no local check confirmed: each is a mark, and marks of several add up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurm_health.core.hook_settings import Marks

_HOUR_S = 3600.0
_MOST = 200


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One job's unconfirmed accusation of a node."""

    job: int
    uid: int
    component: str
    text: str
    time_s: float


def add(marks: Sequence[Mark], mark: Mark, settings: Marks) -> tuple[Mark, ...]:
    """Return the marks with one more, without those that are too old.

    A job marks a node once, however often it is started again.
    """
    kept = [
        each
        for each in alive(marks, mark.time_s, settings)
        if (each.job, each.uid) != (mark.job, mark.uid)
    ]
    return (*kept, mark)[-_MOST:]


def alive(marks: Sequence[Mark], now_s: float, settings: Marks) -> tuple[Mark, ...]:
    """Return the marks that are not too old."""
    return tuple(each for each in marks if now_s - each.time_s <= settings.ttl_h * _HOUR_S)


def convict(marks: Sequence[Mark], settings: Marks) -> bool:
    """Tell whether the marks are from enough different users and enough different jobs.

    One user alone never gets there, whatever number of jobs they run.
    """
    if settings.users == 0:
        return False
    users = {each.uid for each in marks}
    jobs = {each.job for each in marks}
    return len(users) >= settings.users and len(jobs) >= settings.jobs


def summary(marks: Sequence[Mark]) -> str:
    """Say how many accuse, and what the last of them says."""
    users, jobs = {each.uid for each in marks}, {each.job for each in marks}
    last = f"; the last: {marks[-1].component}: {marks[-1].text}" if marks else ""
    return f"accused by {len(jobs)} jobs of {len(users)} users, unconfirmed here{last}"
