# SPDX-License-Identifier: Apache-2.0
"""The index: what all journals say of each node, in a database. Nothing is in it alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import msgspec

from slurm_health.fleet.history.database import DamagedIndex, Database, Row
from slurm_health.fleet.history.place import IndexPlace
from slurm_health.fleet.standing.observation import COUNTED, SETTLED_S, JobSeen, Observation
from slurm_health.fleet.standing.standing import JobOnNode, NodeRecord
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.verdict import Level

# Of one user's jobs on a node that others use too, so many count, the latest: or one user could
# outweigh all others with journals of jobs that never were. Chosen: in 28 days it is four a day.
MOST_JOBS_OF_USER = 100

_TABLES = ("slurm_health_jobs", "slurm_health_seen")
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, kw_only=True)
class NodeSeen:
    """What one check of a job said of one node."""

    cluster: str
    job: str
    label: str
    time_s: float
    uid: int
    said: Observation


class Index:
    """One open index. Its methods raise DamagedIndex, Busy, or IndexUnusable."""

    def __init__(self, place: IndexPlace) -> None:
        """Open an index; one that is new gets its tables."""
        self.place = place
        self._database = Database(place)

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        self._database.close()

    def move_to_memory(self) -> None:
        """Go on with a copy that is lost at the end."""
        copy = self._database.copy_to_memory()
        self._database.close()
        self._database = copy

    def jobs(self, root: Path) -> dict[tuple[str, str], tuple[float, bool]]:
        """Return what is known of each job, by cluster and id.

        From when on that is final, and whether its journal was below `root`.
        """
        rows = self._database.rows(
            "SELECT cluster, job, final_s, root = ? FROM slurm_health_jobs", (_text(root),)
        )
        return {(cluster, job): (final_s, bool(ours)) for cluster, job, final_s, ours in rows}

    def stamp(self, cluster: str, job: str) -> str | None:
        """Return the stamp that a job's journal had, None for one that is not known."""
        found = self._database.rows(
            "SELECT stamp FROM slurm_health_jobs WHERE cluster = ? AND job = ?", (cluster, job)
        )
        return str(found[0][0]) if found else None

    def troubles(self) -> dict[str, int]:
        """Return why journals, or parts of them, could not be read, and of how many jobs."""
        rows = self._database.rows(
            "SELECT trouble, COUNT(*) FROM slurm_health_jobs WHERE trouble != '' GROUP BY trouble"
        )
        return dict(rows)

    def keep(self, root: Path, cluster: str, job: str, read: JobSeen, *, now_s: float) -> None:
        """Put in what a job's journal below `root` says, in place of what it said before.

        Where nothing of it could be read, that stays.
        No check began after `now_s`, whatever its journal says.
        """
        rows = [
            _row(cluster, job, read.uid, check.label, min(check.time_s, now_s), each)
            for check in read.checks
            if isfinite(check.time_s)
            for each in check.seen
        ]
        final_s = SETTLED_S if read.final_s < now_s else read.final_s
        known = (cluster, job, read.uid, read.stamp, final_s, read.trouble, _text(root))
        with self._database.changes():
            tables = ("slurm_health_jobs",) if read.trouble and not read.checks else _TABLES
            self._forget(cluster, job, tables)
            self._database.do("INSERT INTO slurm_health_jobs VALUES (?, ?, ?, ?, ?, ?, ?)", known)
            self._database.put(
                "INSERT INTO slurm_health_seen VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )

    def settle(self, jobs: Iterable[tuple[str, str]], *, now_s: float) -> None:
        """Note of jobs that have become final that they were looked at since."""
        with self._database.changes():
            self._database.put(
                "UPDATE slurm_health_jobs SET final_s = ?"
                " WHERE cluster = ? AND job = ? AND final_s < ?",
                [(SETTLED_S, *each, now_s) for each in jobs],
            )

    def forget(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Remove jobs whose journals are gone."""
        with self._database.changes():
            for cluster, job in jobs:
                self._forget(cluster, job)

    def clusters(self) -> list[str]:
        """Return all clusters that have a journal."""
        rows = self._database.rows("SELECT DISTINCT cluster FROM slurm_health_jobs")
        return sorted(cluster for (cluster,) in rows)

    def has(self, cluster: str, node: str) -> bool:
        """Tell whether a check has seen a node."""
        return bool(
            self._database.rows(
                "SELECT 1 FROM slurm_health_seen WHERE cluster = ? AND node = ? LIMIT 1",
                (cluster, node),
            )
        )

    def nodes(self) -> list[str]:
        """Return the names of all nodes."""
        rows = self._database.rows("SELECT DISTINCT node FROM slurm_health_seen")
        return sorted(node for (node,) in rows)

    def of_node(self, cluster: str, node: str, *, since_s: float) -> list[NodeSeen]:
        """Return what every check said of a node, the oldest first."""
        rows = self._database.rows(
            "SELECT job, label, time_s, uid, data FROM slurm_health_seen"
            " WHERE cluster = ? AND node = ? AND time_s >= ? ORDER BY time_s",
            (cluster, node, since_s),
        )
        return [
            NodeSeen(
                cluster=cluster, job=job, label=label, time_s=time_s, uid=uid, said=_decoded(data)
            )
            for job, label, time_s, uid, data in rows
        ]

    def observations(self, cluster: str, *, since_s: float) -> Iterator[tuple[int, Observation]]:
        """Yield what every check said of every node of a cluster, and whose check it was."""
        query = "SELECT uid, data FROM slurm_health_seen WHERE cluster = ? AND time_s >= ?"
        for uid, data in self._database.rows(query, (cluster, since_s)):
            yield uid, _decoded(data)

    def last_checks(self, cluster: str) -> dict[str, float]:
        """Return when each node of a cluster was checked last."""
        rows = self._database.rows(
            "SELECT node, MAX(time_s) FROM slurm_health_seen WHERE cluster = ? GROUP BY node",
            (cluster,),
        )
        return dict(rows)

    def last_verdicts(self, cluster: str, *, uid: int) -> dict[str, float]:
        """Return when the last check of each node began that came to a verdict on it.

        Checks of this user and of root count. Those of others count where another user has checked
        the node since: or one user's journals could say of a node that it need not be checked.
        """
        found: dict[str, dict[int, float]] = {}
        decided = self._database.rows(
            "SELECT node, uid, MAX(time_s) FROM slurm_health_seen"
            " WHERE cluster = ? AND counted = 1 GROUP BY node, uid",
            (cluster,),
        )
        undecided = self._database.rows(
            "SELECT node, uid, time_s, data FROM slurm_health_seen"
            " WHERE cluster = ? AND counted = 0",
            (cluster,),
        )
        judged = [row[:3] for row in undecided if _decoded(row[3]).level is not None]
        for node, user, time_s in (*decided, *judged):
            of_node = found.setdefault(node, {})
            of_node[user] = max(time_s, of_node.get(user, 0.0))
        return {node: _believed_s(of_node, trusted={0, uid}) for node, of_node in found.items()}

    def checks(self, cluster: str) -> list[list[str]]:
        """Return the nodes of each check of a cluster."""
        found: dict[tuple[str, str], list[str]] = {}
        for job, label, node in self._database.rows(
            "SELECT job, label, node FROM slurm_health_seen WHERE cluster = ?", (cluster,)
        ):
            found.setdefault((job, label), []).append(node)
        return list(found.values())

    def users(self, cluster: str) -> dict[str, int | None]:
        """Return whose checks alone have ever been on each node; None for several users'."""
        rows = self._database.rows(
            "SELECT node, MIN(uid), MAX(uid) FROM slurm_health_seen"
            " WHERE cluster = ? GROUP BY node",
            (cluster,),
        )
        return {node: first if first == last else None for node, first, last in rows}

    def records(self, cluster: str, *, since_s: float) -> list[NodeRecord]:
        """Return the jobs of each node of a cluster, and those it spoiled.

        Where several users have ever been on a node, so many jobs of each count there and no more.
        Times are what users wrote: a user who was there long ago has been there.
        """
        alone = self.users(cluster)
        jobs: dict[str, int] = {}
        ran_s: dict[str, float] = {}
        from_s: dict[tuple[str, int], float] = {}
        window = "FROM slurm_health_seen WHERE cluster = ? AND counted = 1 AND time_s >= ?"
        counts = f"SELECT node, uid, COUNT(DISTINCT job), SUM(ran_s) {window} GROUP BY node, uid"
        for node, uid, count, user_ran_s in self._database.rows(counts, (cluster, since_s)):
            most = count if alone[node] is not None else MOST_JOBS_OF_USER
            jobs[node] = jobs.get(node, 0) + min(count, most)
            ran_s[node] = ran_s.get(node, 0.0) + user_ran_s * min(count, most) / count
            if count > most:
                from_s[node, uid] = self._latest_s(cluster, node, uid, most)
        against = self._database.rows(
            f"SELECT node, job, time_s, uid, spoilt_by {window}"
            " AND spoilt_by != '' ORDER BY time_s",
            (cluster, since_s),
        )
        spoiled = _spoiled(
            (node, job, time_s, uid, signals)
            for node, job, time_s, uid, signals in against
            if time_s >= from_s.get((node, uid), since_s)
        )
        return [
            NodeRecord(
                node=node,
                jobs=count,
                users=1 if alone[node] is not None else 2,
                spoiled=tuple(spoiled.get(node, {}).values()),
                ran_s=ran_s[node],
            )
            for node, count in jobs.items()
        ]

    def _latest_s(self, cluster: str, node: str, uid: int, count: int) -> float:
        """Return when the earliest of a user's latest jobs on a node was checked there last."""
        rows = self._database.rows(
            "SELECT MAX(time_s) FROM slurm_health_seen"
            " WHERE cluster = ? AND node = ? AND uid = ? AND counted = 1"
            " GROUP BY job ORDER BY MAX(time_s) DESC",
            (cluster, node, uid),
        )
        return float(rows[:count][-1][0])

    def _forget(self, cluster: str, job: str, tables: Iterable[str] = _TABLES) -> None:
        for table in tables:
            self._database.do(
                f"DELETE FROM {table} WHERE cluster = ? AND job = ?",  # noqa: S608 - our names
                (cluster, job),
            )


def _believed_s(by_user: Mapping[int, float], *, trusted: Collection[int]) -> float:
    """Return the last time of a trusted user, or the last one but one of the others."""
    others = sorted(time_s for user, time_s in by_user.items() if user not in trusted)
    own = [time_s for user, time_s in by_user.items() if user in trusted]
    return max([0.0, *own, *others[-2:-1]])


def _decoded(data: bytes) -> Observation:
    try:
        return from_msgpack(data, Observation)
    except msgspec.DecodeError as err:
        raise DamagedIndex(str(err)) from err


def _text(root: Path) -> str:
    return os.fsencode(root).decode(errors="replace")


def _row(
    cluster: str, job: str, uid: int, label: str, time_s: float, said: Observation
) -> tuple[str | float | int | bytes, ...]:
    spoilt_by = ",".join(each for each in said.signals if each in COUNTED)
    # What could not be measured counts neither for a node nor against it.
    counted = bool(spoilt_by) or said.level in {Level.HEALTHY, Level.SLOW, Level.FAULTY}
    data = _encoder.encode(said)
    return cluster, said.node, time_s, job, label, uid, int(counted), spoilt_by, said.ran_s, data


def _spoiled(
    rows: Iterable[Row],
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
