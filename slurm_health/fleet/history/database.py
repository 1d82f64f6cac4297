# SPDX-License-Identifier: Apache-2.0
"""The SQLite database of an index: opened, prepared, and its errors sorted by what they mean."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slurm_health.fleet.history.place import IndexPlace
from slurm_health.records.errors import IndexUnusable

# Changes with every change of the tables or of what is put into them.
SCHEMA = 7
_TABLES = (
    """CREATE TABLE slurm_health_jobs (
        cluster TEXT, job TEXT, uid INTEGER, stamp TEXT,
        final_s REAL, trouble TEXT, root TEXT, PRIMARY KEY (cluster, job)
    )""",
    """CREATE TABLE slurm_health_seen (
        cluster TEXT, node TEXT, time_s REAL, job TEXT, label TEXT, uid INTEGER,
        counted INTEGER, spoilt_by TEXT, ran_s REAL, data BLOB
    )""",
    "CREATE INDEX slurm_health_of_node ON slurm_health_seen (cluster, node, time_s)",
    "CREATE INDEX slurm_health_of_job ON slurm_health_seen (cluster, job)",
    """CREATE INDEX slurm_health_in_time ON slurm_health_seen
        (cluster, counted, node, job, time_s, uid, spoilt_by)""",
)

Row = tuple[Any, ...]
# "shlt": tells our file from others of SQLite's.
_APPLICATION = 0x73686C74
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class DamagedIndex(Exception):
    """There is no index that this version can use."""


class Busy(Exception):
    """Another process has held the index for too long."""


class Database:
    """An open connection, without transactions but those that are asked for."""

    def __init__(self, place: IndexPlace) -> None:
        """Open the file, or one in memory; a new one gets its tables.

        Raises:
            DamagedIndex: it is no index of this version.
            Busy: another process has held it for too long.
            IndexUnusable: the disk fails.
        """
        self._place = place
        with self._sorting_errors():
            self._connection = _connect(place)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        self._connection.close()

    def copy_to_memory(self) -> Database:
        """Return a copy in memory, which no reader that locks the file holds up.

        Raises:
            Busy: another process is just writing.
        """
        copy = Database(IndexPlace(path=None))
        try:
            with self._sorting_errors():
                copy._connection.deserialize(self._connection.serialize())
        except BaseException:
            copy.close()
            raise
        return copy

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Row]:
        """Return what a query answers."""
        with self._sorting_errors():
            return self._connection.execute(query, tuple(values)).fetchall()

    def do(self, statement: str, values: Sequence[object] = ()) -> None:
        """Execute a statement that answers nothing."""
        with self._sorting_errors():
            self._connection.execute(statement, tuple(values))

    def put(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """Execute a statement for each row of values."""
        with self._sorting_errors():
            self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def changes(self) -> Iterator[None]:
        """Hold a transaction that others wait for; an error undoes all of it."""
        try:
            self.do("BEGIN IMMEDIATE")
            yield
            self.do("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error says what is wrong
                self.do("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _sorting_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as err:
            code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _BUSY:
                raise Busy(str(err)) from err
            if code in _DAMAGED:
                raise DamagedIndex(str(err)) from err
            raise IndexUnusable(self._place.path or Path(":memory:"), str(err)) from err

    def _prepare(self) -> None:
        application, version = self._pragma("application_id"), self._pragma("user_version")
        tables = self.rows("SELECT COUNT(*) FROM sqlite_schema")[0][0]
        if application == _APPLICATION and version == SCHEMA:
            self.rows("SELECT 1 FROM slurm_health_seen, slurm_health_jobs LIMIT 0")  # are there
            return
        if application != _APPLICATION and tables:
            raise DamagedIndex("is a database of another program")
        if tables:
            raise DamagedIndex("was made by another version of slurm-health")
        if self._place.only_read:
            raise DamagedIndex("is empty")
        with self.changes():
            if self._pragma("user_version") == SCHEMA:
                return  # another process was faster
            for statement in _TABLES:
                self.do(statement)
            self.do(f"PRAGMA application_id = {_APPLICATION}")
            self.do(f"PRAGMA user_version = {SCHEMA}")

    def _pragma(self, name: str) -> int:
        return int(self.rows(f"PRAGMA {name}")[0][0])


def is_index(path: Path) -> bool:
    """Tell whether a file is an index, or nothing yet, and thus ours to remove.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(72)
    return head[68:72] == _APPLICATION.to_bytes(4, "big") or not head


def _connect(place: IndexPlace) -> sqlite3.Connection:
    # Transactions are begun and ended by us, where they are needed.
    if place.path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    mode = "ro" if place.only_read else "rwc"
    connection = sqlite3.connect(
        f"{place.path.as_uri()}?mode={mode}",
        uri=True,
        timeout=place.lock_timeout_s,
        isolation_level=None,
    )
    # A cache: what a crash of the machine damages is rebuilt. No file of it runs anything.
    connection.execute("PRAGMA trusted_schema = OFF")
    if not place.only_read:
        connection.execute("PRAGMA synchronous = OFF")
    return connection
