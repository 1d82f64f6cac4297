# SPDX-License-Identifier: Apache-2.0
"""Looks at and reads the journals of other users, each in a child with limits.

Who fills theirs with what takes long to read is left alone after a while, until the next time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.fleet.standing.observation import JobSeen
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.text import cut, one_line
from slurm_health.system.accounts import Accounts
from slurm_health.system.killable import Answered, Broke, Hung, WorkResult, limit_memory, run_one

_log = logging.getLogger(__name__)
# What reading one job of another user may take. A check of 4,096 nodes has some 100 MB.
_MOST_BYTES = 512 << 20
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 16 << 20
_READ_LIMIT_S = 60.0
_MOST_OF_A_USER_S = 600.0
# So many jobs of a user are looked at by one child: starting one takes longer than looking.
_AT_ONCE = 100
_SHOWN = 200


class _Look(msgspec.Struct, frozen=True):
    """What changes with a job's journal; or why it is not known, empty for one that is gone."""

    stamp: str | None = None
    trouble: str = ""


class Others:
    """Reads the journals of other users, and of each user for so long and no longer.

    Args:
        root: the directory of all journals.
        owners: whose those are that may have changed, by cluster and id, in the order in which they
            are read.
        accounts: whose ids are.
    """

    def __init__(
        self,
        root: Path,
        owners: Mapping[tuple[str, str], int] | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self._root = root
        self._accounts = accounts or Accounts()
        self._of_user: dict[int, list[tuple[str, str]]] = {}
        for job, uid in (owners or {}).items():
            self._of_user.setdefault(self._accounts.user(uid), []).append(job)
        self._looks: dict[tuple[str, str], _Look] = {}
        self._spent_s: dict[int, float] = {}

    def read_if_changed(
        self, uid: int, cluster: str, job: str, stamp: str | None
    ) -> JobSeen | None:
        """Return what a job of a user says; None where that has not changed, or is not known."""
        from slurm_health.fleet.history.read import read_job

        look = self._look(uid, cluster, job)
        if look.trouble:
            return JobSeen(uid=uid, stamp="", final_s=0.0, trouble=look.trouble)
        if look.stamp is None or look.stamp == stamp:
            return None
        return self.read(
            uid, look.stamp, lambda: read_job(self._root, cluster, job, most_bytes=_MOST_BYTES)
        )

    def read(self, uid: int, stamp: str, work: Callable[[], JobSeen]) -> JobSeen | None:
        """Return what a job of a user says, and why not where it cannot be read within limits."""
        match self._limited(uid, lambda: msgspec.msgpack.encode(work())):
            case Answered(data=data):
                return from_msgpack(data, JobSeen)
            case Broke(reason=reason):
                why = f"it cannot be read within limits: {cut(one_line(reason), _SHOWN)}"
            case Hung(limit_s=limit_s):
                stamp, why = "", f"it cannot be read within {limit_s:g} s"
            case None:
                return None
        # What broke is not tried again before its stamp changes.
        return JobSeen(uid=uid, stamp=stamp, final_s=0.0, trouble=why)

    def _look(self, uid: int, cluster: str, job: str) -> _Look:
        """Return what changes with a job's journal, which is looked at with the user's next ones.

        A run has a directory and files: of many thousands even that takes long.
        """
        if (cluster, job) not in self._looks:
            some = self._next_of(uid, (cluster, job))
            outcome = self._limited(uid, lambda: msgspec.msgpack.encode(self._looked(some)))
            looks = [_Look()] * len(some)
            if isinstance(outcome, Answered):
                looks = from_msgpack(outcome.data, list[_Look])
            elif outcome is not None:
                _log.warning("%d jobs of user %d cannot be looked at within limits", len(some), uid)
            self._looks.update(zip(some, looks, strict=True))
        return self._looks.pop((cluster, job))

    def _next_of(self, uid: int, first: tuple[str, str]) -> list[tuple[str, str]]:
        """Take the next jobs of a user, beginning with this one."""
        uid = self._accounts.user(uid)
        theirs = self._of_user.get(uid, [])
        at = theirs.index(first) if first in theirs else len(theirs)
        some, self._of_user[uid] = theirs[at : at + _AT_ONCE], theirs[at + _AT_ONCE :]
        return some or [first]

    def _looked(self, jobs: Sequence[tuple[str, str]]) -> list[_Look]:
        from slurm_health.fleet.history.read import stamp_of

        found = []
        for cluster, job in jobs:
            try:
                found.append(_Look(stamp=stamp_of(self._root, cluster, job)))
            except FileNotFoundError:
                found.append(_Look())  # it is being removed
            except OSError as err:  # closed to this user, where several share the root
                found.append(_Look(trouble=err.strerror or str(err)))
        return found

    def _limited(self, uid: int, work: Callable[[], bytes]) -> WorkResult | None:
        """Work on what a user wrote, in a child; None where theirs has taken too long already."""
        uid = self._accounts.user(uid)
        spent_s = self._spent_s.get(uid, 0.0)
        if spent_s > _MOST_OF_A_USER_S:
            return None

        def limited() -> bytes:
            limit_memory(_MEMORY_BYTES)
            return work()

        began_s = time.monotonic()
        outcome = run_one(limited, _READ_LIMIT_S, most_bytes=_ANSWER_BYTES)
        self._spent_s[uid] = spent_s = spent_s + time.monotonic() - began_s
        if spent_s > _MOST_OF_A_USER_S:
            _log.warning("further journals of user %d are left for the next time", uid)
        return outcome
