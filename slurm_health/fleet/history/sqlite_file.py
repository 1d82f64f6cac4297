# SPDX-License-Identifier: Apache-2.0
"""An index in an SQLite file, or in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from slurm_health.fleet.history.database import PATIENCE_S, SCHEMA, Busy, Damaged, Database, Dialect
from slurm_health.fleet.history.place import IndexPlace
from slurm_health.records.errors import IndexUnusable

# "shlt": tells our file from others of SQLite's.
_APPLICATION = 0x73686C74
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def opened(place: IndexPlace) -> Database:
    """Open the file; one that is new gets its tables.

    Raises:
        Damaged: it is no index of this version.
        Busy: another process has held it for too long.
        IndexUnusable: the disk fails.
    """

    def problem(err: Exception) -> Exception:
        code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _BUSY:
            return Busy(str(err))
        if code in _DAMAGED:
            return Damaged(str(err))
        return IndexUnusable(place.path or Path(":memory:"), str(err))

    dialect = Dialect(
        value="?",
        begin=("BEGIN IMMEDIATE",),
        text="TEXT",
        binary="BLOB",
        options="",
        errors=(sqlite3.DatabaseError,),
        problem=problem,
    )
    try:
        database = Database(_connect(place), dialect)
    except sqlite3.DatabaseError as err:
        raise problem(err) from err
    try:
        _prepare(database, place)
    except BaseException:
        database.close()
        raise
    return database


def copied(database: Database) -> Database:
    """Return a copy in memory; who only reads the file, and locks it so, hinders that in nothing.

    Raises:
        Busy: another process is just writing.
    """
    copy = Database(_connect(IndexPlace(path=None)), database.dialect)
    try:
        copy.load(database)
    except BaseException:
        copy.close()
        raise
    return copy


def is_index(path: Path) -> bool:
    """Tell whether a file is an index, or nothing yet, and thus ours to remove.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(72)
    return head[68:72] == _APPLICATION.to_bytes(4, "big") or not head


def _connect(place: IndexPlace) -> sqlite3.Connection:
    path, mode = place.path, "ro" if place.only_read else "rwc"
    # Transactions are begun and ended by us, where they are needed.
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    found = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=PATIENCE_S, isolation_level=None
    )
    # A cache: what a crash of the machine damages is rebuilt. No file of it runs anything.
    found.execute("PRAGMA trusted_schema = OFF")
    if not place.only_read:
        found.execute("PRAGMA synchronous = OFF")
    return found


def _prepare(database: Database, place: IndexPlace) -> None:
    application, version = _pragma(database, "application_id"), _pragma(database, "user_version")
    tables = database.rows("SELECT COUNT(*) FROM sqlite_schema")[0][0]
    if application == _APPLICATION and version == SCHEMA:
        database.rows(
            "SELECT 1 FROM slurm_health_seen, slurm_health_jobs LIMIT 0"
        )  # they are there
        return
    if application != _APPLICATION and tables:
        raise Damaged("is a database of another program")
    if tables:
        raise Damaged("was made by another version of slurm-health")
    if place.only_read:
        raise Damaged("is empty")
    with database.changes():
        if _pragma(database, "user_version") == SCHEMA:
            return  # another process was faster
        database.make_tables()
        database.do(f"PRAGMA application_id = {_APPLICATION}")
        database.do(f"PRAGMA user_version = {SCHEMA}")


def _pragma(database: Database, name: str) -> int:
    return int(database.rows(f"PRAGMA {name}")[0][0])
