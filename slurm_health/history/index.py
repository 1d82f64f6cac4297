# SPDX-License-Identifier: Apache-2.0
"""The index: what all journals say of each node, in an SQLite file. Nothing is in it alone."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.core.history.observation import COUNTED, JobSeen, Observation
from slurm_health.core.history.standing import JobOnNode, NodeRecord
from slurm_health.core.verdict import Level
from slurm_health.errors import IndexUnusable
from slurm_health.history.place import Place

# "shlt": tells our file from others of SQLite's.
_APPLICATION = 0x73686C74
# Changes with every change of the tables or of what is put into them.
_SCHEMA = 1
# Another process that brings the index up to date commits many times a second.
_PATIENCE_S = 10.0
_TABLES = """
CREATE TABLE jobs (
    cluster TEXT, job TEXT, uid INTEGER, stamp TEXT, final_s REAL, trouble TEXT,
    PRIMARY KEY (cluster, job)
) WITHOUT ROWID;
CREATE TABLE seen (
    cluster TEXT, node TEXT, time_s REAL, job TEXT, label TEXT, uid INTEGER,
    counted INTEGER, against TEXT, data BLOB
);
CREATE INDEX of_node ON seen (cluster, node, time_s);
CREATE INDEX of_job ON seen (cluster, job);
CREATE INDEX in_time ON seen (cluster, counted, node, job, time_s, uid, against);
"""
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Observation)


class Damaged(Exception):
    """The file is no index that this version can use."""


class Busy(Exception):
    """Another process has held the index for too long."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one check of a job said of one node."""

    cluster: str
    job: str
    label: str
    time_s: float
    uid: int
    said: Observation


class Index:
    """One open index. Its methods raise Damaged, Busy, or IndexUnusable where the disk fails."""

    def __init__(self, place: Place) -> None:
        """Open an index; one that is new gets its tables."""
        self.place = place
        self._path = place.path or Path(":memory:")
        with self._telling():
            self._sqlite = _connect(place)
            try:
                self._prepare()
            except BaseException:
                self._sqlite.close()
                raise

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        self._sqlite.close()

    def jobs(self) -> dict[tuple[str, str], float]:
        """Return from when on what is known of each job is final, by cluster and id."""
        with self._telling():
            rows = self._sqlite.execute("SELECT cluster, job, final_s FROM jobs")
            return {(cluster, job): final_s for cluster, job, final_s in rows}

    def stamp(self, cluster: str, job: str) -> str | None:
        """Return the stamp that a job's journal had, None for one that is not known."""
        with self._telling():
            found = self._sqlite.execute(
                "SELECT stamp FROM jobs WHERE cluster = ? AND job = ?", (cluster, job)
            ).fetchone()
        return None if found is None else str(found[0])

    def troubles(self) -> dict[str, int]:
        """Return why journals, or parts of them, could not be read, and of how many jobs."""
        with self._telling():
            rows = self._sqlite.execute(
                "SELECT trouble, COUNT(*) FROM jobs WHERE trouble != '' GROUP BY trouble"
            )
            return dict(rows.fetchall())

    def keep(self, cluster: str, job: str, read: JobSeen) -> None:
        """Put in what a job's journal says, in place of what it said before."""
        rows = [
            _row(cluster, job, read.uid, check.label, check.time_s, each)
            for check in read.checks
            for each in check.seen
        ]
        with self._telling(), self._sqlite:
            self._sqlite.execute("BEGIN IMMEDIATE")
            self._forget(cluster, job)
            self._sqlite.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?)",
                (cluster, job, read.uid, read.stamp, read.final_s, read.trouble),
            )
            self._sqlite.executemany("INSERT INTO seen VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def forget(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Remove jobs whose journals are gone."""
        with self._telling(), self._sqlite:
            self._sqlite.execute("BEGIN IMMEDIATE")
            for cluster, job in jobs:
                self._forget(cluster, job)

    def clusters(self) -> list[str]:
        """Return all clusters that have a journal."""
        with self._telling():
            rows = self._sqlite.execute("SELECT DISTINCT cluster FROM jobs ORDER BY cluster")
            return [cluster for (cluster,) in rows]

    def has(self, cluster: str, node: str) -> bool:
        """Tell whether a check has seen a node."""
        with self._telling():
            found = self._sqlite.execute(
                "SELECT 1 FROM seen WHERE cluster = ? AND node = ? LIMIT 1", (cluster, node)
            )
            return found.fetchone() is not None

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        with self._telling():
            rows = self._sqlite.execute("SELECT DISTINCT node FROM seen ORDER BY node")
            return [node for (node,) in rows]

    def of_node(self, cluster: str, node: str, *, since_s: float) -> list[Seen]:
        """Return what every check said of a node, the oldest first."""
        with self._telling():
            rows = self._sqlite.execute(
                "SELECT job, label, time_s, uid, data FROM seen"
                " WHERE cluster = ? AND node = ? AND time_s >= ? ORDER BY time_s",
                (cluster, node, since_s),
            )
            return [
                Seen(
                    cluster=cluster,
                    job=job,
                    label=label,
                    time_s=time_s,
                    uid=uid,
                    said=_decoder.decode(data),
                )
                for job, label, time_s, uid, data in rows
            ]

    def last_checks(self, cluster: str) -> dict[str, float]:
        """Return when each node of a cluster was checked last."""
        with self._telling():
            rows = self._sqlite.execute(
                "SELECT node, MAX(time_s) FROM seen WHERE cluster = ? GROUP BY node", (cluster,)
            )
            return dict(rows.fetchall())

    def checks(self, cluster: str) -> list[list[str]]:
        """Return the nodes of each check of a cluster."""
        found: dict[tuple[str, str], list[str]] = {}
        with self._telling():
            for job, label, node in self._sqlite.execute(
                "SELECT job, label, node FROM seen WHERE cluster = ?", (cluster,)
            ):
                found.setdefault((job, label), []).append(node)
        return list(found.values())

    def records(self, cluster: str, *, since_s: float) -> list[NodeRecord]:
        """Return the jobs of each node of a cluster, and those it spoiled."""
        with self._telling():
            counts = self._sqlite.execute(
                "SELECT node, COUNT(DISTINCT job), MIN(uid) != MAX(uid)"
                " FROM seen INDEXED BY in_time"
                " WHERE cluster = ? AND counted = 1 AND time_s >= ? GROUP BY node",
                (cluster, since_s),
            ).fetchall()
            against = self._sqlite.execute(
                "SELECT node, job, time_s, uid, against FROM seen INDEXED BY in_time"
                " WHERE cluster = ? AND counted = 1 AND time_s >= ? AND against != ''"
                " ORDER BY time_s",
                (cluster, since_s),
            ).fetchall()
        spoiled = _spoiled(against)
        return [
            NodeRecord(
                node=node,
                jobs=jobs,
                users=1 + several,
                spoiled=tuple(spoiled.get(node, {}).values()),
            )
            for node, jobs, several in counts
        ]

    def _forget(self, cluster: str, job: str) -> None:
        for table in ("jobs", "seen"):
            self._sqlite.execute(
                f"DELETE FROM {table} WHERE cluster = ? AND job = ?",  # noqa: S608 - our names
                (cluster, job),
            )

    def _prepare(self) -> None:
        application = self._pragma("application_id")
        version = self._pragma("user_version")
        tables = self._sqlite.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
        if application == _APPLICATION and version == _SCHEMA:
            self._sqlite.execute("SELECT 1 FROM seen, jobs LIMIT 0")  # they are there
            return
        if application != _APPLICATION and tables:
            raise Damaged("is a database of another program")
        if tables:
            raise Damaged("was made by another version of slurm-health")
        if self.place.only_read:
            raise Damaged("is empty")
        with self._sqlite:
            self._sqlite.execute("BEGIN IMMEDIATE")
            if self._pragma("user_version") == _SCHEMA:
                return  # another process was faster
            for statement in _TABLES.split(";\n"):
                self._sqlite.execute(statement)
            self._sqlite.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._sqlite.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _pragma(self, name: str) -> int:
        return int(self._sqlite.execute(f"PRAGMA {name}").fetchone()[0])

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except msgspec.DecodeError as err:
            raise Damaged(str(err)) from err
        except sqlite3.DatabaseError as err:
            code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _BUSY:
                raise Busy(str(err)) from err
            if code in _DAMAGED:
                raise Damaged(str(err)) from err
            raise IndexUnusable(self._path, str(err)) from err


def _connect(place: Place) -> sqlite3.Connection:
    path, mode = place.path, "ro" if place.only_read else "rwc"
    # Transactions are begun and ended by us, where they are needed.
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    found = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=_PATIENCE_S, isolation_level=None
    )
    # A cache: what a crash of the machine damages is rebuilt. No file of it runs anything.
    found.execute("PRAGMA trusted_schema = OFF")
    if not place.only_read:
        found.execute("PRAGMA synchronous = OFF")
    return found


def _row(
    cluster: str, job: str, uid: int, label: str, time_s: float, said: Observation
) -> tuple[str | float | int | bytes, ...]:
    against = ",".join(each for each in said.signals if each in COUNTED)
    # What could not be measured counts neither for a node nor against it.
    counted = bool(against) or said.level in {Level.HEALTHY, Level.SLOW, Level.FAULTY}
    data = _encoder.encode(said)
    return cluster, said.node, time_s, job, label, uid, counted, against, data


def _spoiled(
    rows: Iterable[tuple[str, str, float, int, str]],
) -> dict[str, dict[str, JobOnNode]]:
    """Return each node's spoiled jobs, by their ids: several checks of one job are one."""
    found: dict[str, dict[str, JobOnNode]] = {}
    for node, job, time_s, uid, against in rows:
        jobs = found.setdefault(node, {})
        before = jobs.get(job)
        signals = dict.fromkeys([*(before.signals if before else ()), *against.split(",")])
        first_s = before.time_s if before else time_s
        jobs[job] = JobOnNode(job=job, time_s=first_s, uid=uid, signals=tuple(signals))
    return found
