# SPDX-License-Identifier: Apache-2.0
"""The index: what all journals say of each node, in an SQLite file. Nothing is in it alone.

It is a cache: each command brings it up to date first, and one that is damaged, missing or of
another version is made anew. A job that was read once it was final is not looked at again, so an
index of years costs one listing.

Each user has one, in the cache directory of their home.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.fleet.observation import COUNTED, Observation
from slurm_health.fleet.reading import (
    NEVER_S,
    SETTLED_S,
    JobReading,
    JournalReader,
    KnownJob,
    jobs_below,
)
from slurm_health.fleet.standing import NodeRecord, SpoiledJob
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import IndexUnusable, JournalError
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.accounts import Accounts

_log = logging.getLogger(__name__)

# Of one user's jobs on a node that others use too, so many count, the latest: or one user could
# outweigh all others with journals of jobs that never were. Chosen: in 28 days it is four a day.
MOST_JOBS_OF_USER = 100
# Another process that brings the index up to date commits many times a second.
_LOCK_TIMEOUT_S = 10.0

# Changes with every change of the tables or of what is put into them.
_SCHEMA = 10
_TABLES = (
    """CREATE TABLE IF NOT EXISTS slurm_health_jobs (
        cluster TEXT, job TEXT, uid INTEGER, stamp TEXT,
        final_s REAL, trouble TEXT, PRIMARY KEY (cluster, job)
    )""",
    """CREATE TABLE IF NOT EXISTS slurm_health_checks (
        cluster TEXT, node TEXT, time_s REAL, job TEXT, label TEXT, uid INTEGER,
        counted INTEGER, judged INTEGER, spoilt_by TEXT, data BLOB
    )""",
    """CREATE INDEX IF NOT EXISTS slurm_health_of_node ON slurm_health_checks
        (cluster, node, time_s, uid)""",
    "CREATE INDEX IF NOT EXISTS slurm_health_of_job ON slurm_health_checks (cluster, job)",
    """CREATE INDEX IF NOT EXISTS slurm_health_in_time ON slurm_health_checks
        (cluster, counted, node, job, time_s, uid, spoilt_by)""",
)
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}

Progress = Callable[[int, int], None]
_encoder = msgspec.msgpack.Encoder()


class DamagedIndex(IndexUnusable):
    """The file is no index that this version can use."""


class OtherVersion(DamagedIndex):
    """It was made by another version, and is made anew without a word."""


class IndexBusy(IndexUnusable):
    """Another process has held the index for too long."""


def index_path(root: Path, environ: Mapping[str, str]) -> Path | None:
    """Return where the index of the journals below `root` is; its directory is made.

    None if there is no home directory, or nothing can be written there: a log line says so, and
    the journals are read each time.
    """
    cache = environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
        directory = home / "slurm-health"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if os.access(directory, os.W_OK | os.X_OK) else f"{directory} is read-only"
    except (OSError, RuntimeError) as err:  # a user without a home
        problem = str(err)
    if problem:
        _log.warning("the history is indexed anew, and the index is not kept: %s", problem)
        return None
    # One per root: jobs of two roots may have the same ids.
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
    return directory / f"history-{name}.sqlite"


class NodeCheck(Observation, frozen=True, kw_only=True, omit_defaults=False):
    """What one check of a job says of one node."""

    job: str
    label: str
    time_s: float
    uid: int


class Index:
    """One open index. Its methods raise DamagedIndex, IndexBusy, or another IndexUnusable."""

    def __init__(self, path: Path | None, *, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        """Open an index, None for one in memory; one that is new gets its tables."""
        self.path = path
        with self._sorting_errors():
            # Transactions are begun and ended here, where they are needed.
            self._db = sqlite3.connect(
                path or ":memory:", timeout=lock_timeout_s, isolation_level=None
            )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        self._db.close()

    def _prepare(self) -> None:
        # In this order: another process may be making the tables, and sets the version with them.
        ((tables,),) = self._rows("SELECT COUNT(*) FROM sqlite_schema")
        ((version,),) = self._rows("PRAGMA user_version")
        if tables and version != _SCHEMA:
            raise OtherVersion(str(self.path), "was made by another version of slurm-health")
        # A cache: what a crash of the machine damages is rebuilt. No file of it runs anything.
        self._rows("PRAGMA trusted_schema = OFF")
        self._rows("PRAGMA synchronous = OFF")
        if not tables:
            with self._changing():
                for statement in _TABLES:
                    self._rows(statement)
                self._rows(f"PRAGMA user_version = {_SCHEMA}")
        self._rows("SELECT 1 FROM slurm_health_checks, slurm_health_jobs LIMIT 0")  # are there

    def _damaged(self, problem: str) -> DamagedIndex:
        fix = "remove it: it is made anew"
        return DamagedIndex(str(self.path), f"is damaged: {problem}", fix=fix)

    @contextlib.contextmanager
    def _sorting_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as err:
            code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _BUSY:
                problem, fix = f"another process works on it: {err}", "try again when it has ended"
                raise IndexBusy(str(self.path), problem, fix=fix) from err
            if code in _DAMAGED:
                raise self._damaged(str(err)) from err
            raise IndexUnusable(str(self.path), str(err)) from err

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._sorting_errors():
            return self._db.execute(statement, tuple(values)).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold a transaction that others wait for; an error undoes all of it."""
        with self._sorting_errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    # --- what refresh keeps ----------------------------------------------------------------------

    def jobs(self) -> dict[tuple[str, str], tuple[float, str]]:
        """Return what is known of each job, by cluster and id.

        That is from when on it is final, and its journal's stamp, empty if it is not needed.
        """
        rows = self._rows(
            "SELECT cluster, job, final_s, CASE final_s WHEN ? THEN '' ELSE stamp END"
            " FROM slurm_health_jobs",
            (SETTLED_S,),
        )
        return {(cluster, job): (final_s, stamp) for cluster, job, final_s, stamp in rows}

    def keep(self, cluster: str, job: str, read: JobReading, *, now_s: float) -> None:
        """Put in what a job's journal says, in place of what it said before.

        Where nothing of it could be read, that stays. No check began after `now_s`, whatever its
        journal says.
        """
        checks = []
        for check in read.checks:
            for node in check.nodes if math.isfinite(check.time_s) else ():
                spoilt_by = ",".join(signal for signal in node.signals if signal in COUNTED)
                # What could not be measured counts neither for a node nor against it.
                counted = bool(spoilt_by) or node.level in {Level.HEALTHY, Level.SLOW, Level.FAULTY}
                judged = counted or node.level is not None
                time_s, data = min(check.time_s, now_s), _encoder.encode(node)
                where = (cluster, node.node, time_s, job, check.label, read.uid)
                checks.append((*where, int(counted), int(judged), spoilt_by, data))
        final_s = SETTLED_S if read.final_s < now_s else read.final_s
        known = (cluster, job, read.uid, read.stamp, final_s, read.trouble)
        with self._changing():
            self._db.execute(
                "INSERT OR REPLACE INTO slurm_health_jobs VALUES (?, ?, ?, ?, ?, ?)", known
            )
            if checks or not read.trouble:
                self._db.execute(
                    "DELETE FROM slurm_health_checks WHERE cluster = ? AND job = ?", (cluster, job)
                )
            self._db.executemany(
                "INSERT INTO slurm_health_checks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", checks
            )

    def forget(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Remove jobs whose journals are gone."""
        with self._changing():
            for table in ("slurm_health_jobs", "slurm_health_checks"):
                statement = f"DELETE FROM {table} WHERE cluster = ? AND job = ?"  # noqa: S608
                self._db.executemany(statement, jobs)

    # --- what is asked ---------------------------------------------------------------------------

    def troubles(self) -> dict[str, int]:
        """Return why journals, or parts of them, could not be read, and of how many jobs."""
        return dict(
            self._rows(
                "SELECT trouble, COUNT(*) FROM slurm_health_jobs WHERE trouble != ''"
                " GROUP BY trouble"
            )
        )

    def clusters(self) -> list[str]:
        """Return all clusters that have a journal."""
        return sorted(
            name for (name,) in self._rows("SELECT DISTINCT cluster FROM slurm_health_jobs")
        )

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        return sorted(
            name for (name,) in self._rows("SELECT DISTINCT node FROM slurm_health_checks")
        )

    def checks_of(self, cluster: str, node: str) -> list[NodeCheck]:
        """Return what every check said of a node, the oldest first."""
        checks = []
        for job, label, time_s, uid, data in self._rows(
            "SELECT job, label, time_s, uid, data FROM slurm_health_checks"
            " WHERE cluster = ? AND node = ? ORDER BY time_s",
            (cluster, node),
        ):
            try:
                fields = msgspec.structs.asdict(from_msgpack(data, Observation))
            except msgspec.DecodeError as err:
                raise self._damaged(str(err)) from err
            checks.append(NodeCheck(job=job, label=label, time_s=time_s, uid=uid, **fields))
        return checks

    def last_checks(self, cluster: str) -> dict[str, float]:
        """Return when the last check of each node of a cluster began."""
        return dict(
            self._rows(
                "SELECT node, MAX(time_s) FROM slurm_health_checks WHERE cluster = ? GROUP BY node",
                (cluster,),
            )
        )

    def last_verdicts(self, cluster: str, *, uid: int) -> dict[str, float]:
        """Return when the last check of each node began that came to a verdict on it.

        Checks of this user and of root count. Those of others count where another user has checked
        the node since: or one user's journals could say of a node that it need not be checked.
        """
        trusted: dict[str, float] = {}
        others: dict[str, list[float]] = {}
        for node, user, time_s in self._rows(
            "SELECT node, uid, MAX(time_s) FROM slurm_health_checks"
            " WHERE cluster = ? AND judged = 1 GROUP BY node, uid",
            (cluster,),
        ):
            if user in {0, uid}:
                trusted[node] = max(time_s, trusted.get(node, 0.0))
            else:
                others.setdefault(node, []).append(time_s)
        return {
            node: max([0.0, trusted.get(node, 0.0), *sorted(others.get(node, []))[-2:-1]])
            for node in {**trusted, **others}
        }

    def groups(self, cluster: str) -> list[list[str]]:
        """Return the nodes of each check of a cluster."""
        groups: dict[tuple[str, str], list[str]] = {}
        for job, label, node in self._rows(
            "SELECT job, label, node FROM slurm_health_checks WHERE cluster = ?", (cluster,)
        ):
            groups.setdefault((job, label), []).append(node)
        return list(groups.values())

    def only_users(self, cluster: str) -> dict[str, int | None]:
        """Return the one user whose checks have ever been on each node; None for several."""
        rows = self._rows(
            "SELECT node, MIN(uid), MAX(uid) FROM slurm_health_checks"
            " WHERE cluster = ? GROUP BY node",
            (cluster,),
        )
        return {node: first if first == last else None for node, first, last in rows}

    def records(self, cluster: str, *, since_s: float) -> list[NodeRecord]:
        """Return the jobs of each node of a cluster, and those it spoiled.

        Where several users have ever been on a node, so many jobs of each count there and no more.
        Times are what users wrote: a user who was there long ago has been there.
        """
        alone = self.only_users(cluster)
        jobs: dict[str, int] = {}
        from_s: dict[tuple[str, int], float] = {}
        window = "FROM slurm_health_checks WHERE cluster = ? AND counted = 1 AND time_s >= ?"
        counts = f"SELECT node, uid, COUNT(DISTINCT job) {window} GROUP BY node, uid"
        for node, uid, count in self._rows(counts, (cluster, since_s)):
            most = count if alone[node] is not None else MOST_JOBS_OF_USER
            jobs[node] = jobs.get(node, 0) + min(count, most)
            if count > most:
                latest = self._rows(
                    "SELECT MAX(time_s) FROM slurm_health_checks"
                    " WHERE cluster = ? AND node = ? AND uid = ? AND counted = 1"
                    " GROUP BY job ORDER BY MAX(time_s) DESC LIMIT ?",
                    (cluster, node, uid, most),
                )
                from_s[node, uid] = float(latest[-1][0])
        spoiled: dict[str, dict[str, SpoiledJob]] = {}
        for node, job, time_s, uid, signals in self._rows(
            f"SELECT node, job, time_s, uid, spoilt_by {window}"
            " AND spoilt_by != '' ORDER BY time_s",
            (cluster, since_s),
        ):
            if time_s < from_s.get((node, uid), since_s):
                continue
            # Several checks of one job are one.
            before = spoiled.setdefault(node, {}).get(job)
            known = before.signals if before else ()
            spoiled[node][job] = SpoiledJob(
                job=job,
                time_s=before.time_s if before else time_s,
                uid=uid,
                signals=tuple(dict.fromkeys([*known, *signals.split(",")])),
            )
        return [
            NodeRecord(
                node=node,
                jobs=count,
                users=1 if alone[node] is not None else 2,
                spoiled=tuple(spoiled.get(node, {}).values()),
            )
            for node, count in jobs.items()
        ]


def opened(
    path: Path | None,
    root: Path,
    *,
    now_s: float,
    progress: Progress = lambda _done, _of: None,
    lock_timeout_s: float = _LOCK_TIMEOUT_S,
) -> contextlib.closing[Index]:
    """Hold open an index that says what the journals say now.

    One that is damaged, or of another version, is made anew. If another process keeps the file
    locked, the answer is that of the last update.

    Raises:
        IndexUnusable: it cannot be used where it lies.
        JournalError: the journals cannot be listed.
    """
    try:
        index = _opened(path, root, now_s, progress, lock_timeout_s)
    except DamagedIndex as err:
        if path is None:
            raise
        if not isinstance(err, OtherVersion):
            _log.info("the history is indexed anew: %s", err)
        for name in (path, Path(f"{path}-journal")):
            name.unlink(missing_ok=True)
        index = _opened(path, root, now_s, progress, lock_timeout_s)
    return contextlib.closing(index)


def _opened(
    path: Path | None, root: Path, now_s: float, progress: Progress, lock_timeout_s: float
) -> Index:
    index = Index(path, lock_timeout_s=lock_timeout_s)
    try:
        bring_up_to_date(index, root, now_s=now_s, progress=progress)
    except IndexBusy as err:
        _log.warning("the answer may lack the latest jobs: %s", err)
    except BaseException:
        index.close()
        raise
    return index


def bring_up_to_date(
    index: Index,
    root: Path,
    *,
    now_s: float,
    progress: Progress = lambda _done, _of: None,
    accounts: Accounts | None = None,
) -> None:
    """Put into an index what the journals say now.

    Raises:
        IndexBusy: another process works on it.
        DamagedIndex: it cannot be used.
        JournalError: the journals cannot be listed.
    """
    known = index.jobs()
    try:
        there = {(cluster, entry.name) for cluster, entry in jobs_below(root)}
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    if gone := [job for job in known if job not in there]:
        index.forget(gone)
    new = (math.inf, "")
    left = [job for job in there if known.get(job, new)[0] != SETTLED_S]
    # What could not be read comes last: it may take all the time that its user is given.
    left.sort(key=lambda job: (known.get(job, new)[0] == NEVER_S, job))
    reader, done = JournalReader(root, accounts), 0
    by_owner: dict[int, list[KnownJob]] = {}
    for name, look in zip(
        left, journal.statuses([root.joinpath(*job) for job in left]), strict=True
    ):
        final_s, stamp = known.get(name, new)
        if look is not None and look.trouble:
            index.keep(*name, JobReading(uid=-1, trouble=look.trouble), now_s=now_s)
        elif look is not None:
            # What became final since the last look may have changed before: it is read once more.
            job = KnownJob(*name, "" if final_s < now_s else stamp)
            by_owner.setdefault(look.uid, []).append(job)
    for uid, jobs in by_owner.items():
        for job, reading in reader.read(uid, jobs):
            progress(done, len(left))
            done += 1
            if reading is not None:
                read = msgspec.structs.replace(reading, uid=reader.user(uid))
                index.keep(job.cluster, job.job, read, now_s=now_s)
