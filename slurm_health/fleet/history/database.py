# SPDX-License-Identifier: Apache-2.0
"""The database that an index lies in: SQLite, PostgreSQL and MariaDB are asked in one way.

What differs between them is a `Dialect`. Queries are written with `?` for values, and in the SQL
that all three understand.

An SQLite file, or one in memory, is opened here; a server by `server`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_health.fleet.history.place import IndexPlace
from slurm_health.records.errors import IndexUnusable

# Changes with every change of the tables or of what is put into them.
SCHEMA = 6
# Another process that brings the index up to date commits many times a second.
PATIENCE_S = 10
# With which a transaction on a server begins, that no other change runs beside.
BEGIN = ("BEGIN", "SELECT version FROM slurm_health_index WHERE id = 1 FOR UPDATE")
_TABLES = (
    """CREATE TABLE slurm_health_jobs (
        cluster VARCHAR(255), job VARCHAR(40), uid BIGINT, stamp {text},
        final_s DOUBLE PRECISION, trouble {text}, root {text}, PRIMARY KEY (cluster, job)
    ){options}""",
    """CREATE TABLE slurm_health_seen (
        cluster VARCHAR(255), node VARCHAR(255), time_s DOUBLE PRECISION, job VARCHAR(40),
        label VARCHAR(255), uid BIGINT, counted INTEGER, spoilt_by VARCHAR(64),
        ran_s DOUBLE PRECISION, data {binary}
    ){options}""",
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


class Denied(Exception):
    """The account may not do this."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """The codes of a server's errors, by what they mean."""

    damaged: Collection[object]  # no such table or column
    busy: Collection[object]  # a lock not given, a deadlock
    denied: Collection[object]  # no right to a command, a server that only answers

    def meaning(self, code: object, said: str) -> Exception | None:
        """Return what an error means for the index, None where it is about the server."""
        if code in self.damaged:
            return DamagedIndex(said)
        if code in self.busy:
            return Busy(said)
        return Denied(said) if code in self.denied else None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of database differs from the others.

    `value` stands for a value in a statement. `begin` starts a transaction that no other change
    runs beside; `lock` and `unlock` do likewise before there is any table. `problem` returns what
    an error of the driver means: DamagedIndex, Busy, Denied or IndexUnusable. `errors` are the
    classes of the driver's errors.
    """

    value: str
    begin: Sequence[str]
    text: str
    binary: str
    options: str
    errors: tuple[type[Exception], ...]
    problem: Callable[[Exception], Exception]
    lock: str = ""
    unlock: str = ""


class Database:
    """An open connection, without transactions but those that are asked for."""

    def __init__(self, connection: Any, dialect: Dialect) -> None:  # PEP 249 has no types
        self._connection = connection
        self.dialect = dialect

    def close(self) -> None:
        """Close it; what was not committed is lost."""
        self._connection.close()

    def load(self, other: Database) -> None:
        """Take over all that another SQLite database holds, as it was when it last changed."""
        with self._telling():
            self._connection.deserialize(other._connection.serialize())

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Row]:
        """Return what a query answers."""
        with self._telling():
            cursor = self._connection.cursor()
            cursor.execute(self._spelled(query), tuple(values))
            return [tuple(each) for each in cursor.fetchall()]

    def do(self, statement: str, values: Sequence[object] = ()) -> None:
        """Execute a statement that answers nothing."""
        with self._telling():
            self._connection.cursor().execute(self._spelled(statement), tuple(values))

    def put(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        """Execute a statement for each row of values."""
        if rows:
            with self._telling():
                self._connection.cursor().executemany(self._spelled(statement), list(rows))

    @contextlib.contextmanager
    def changes(self, *begin: str) -> Iterator[None]:
        """Hold a transaction that others wait for; an error undoes all of it."""
        try:
            for statement in begin or self.dialect.begin:
                self.do(statement)
            yield
            self.do("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error says what is wrong
                self.do("ROLLBACK")
            raise

    def make_tables(self) -> None:
        """Make the tables of an index."""
        words = self.dialect
        for statement in _TABLES:
            self.do(statement.format(text=words.text, binary=words.binary, options=words.options))

    def _spelled(self, statement: str) -> str:
        return statement.replace("?", self.dialect.value)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except self.dialect.errors as err:
            raise self.dialect.problem(err) from err


def opened(place: IndexPlace) -> Database:
    """Open the file; one that is new gets its tables.

    Raises:
        DamagedIndex: it is no index of this version.
        Busy: another process has held it for too long.
        IndexUnusable: the disk fails.
    """

    def problem(err: Exception) -> Exception:
        code = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _BUSY:
            return Busy(str(err))
        if code in _DAMAGED:
            return DamagedIndex(str(err))
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
        raise DamagedIndex("is a database of another program")
    if tables:
        raise DamagedIndex("was made by another version of slurm-health")
    if place.only_read:
        raise DamagedIndex("is empty")
    with database.changes():
        if _pragma(database, "user_version") == SCHEMA:
            return  # another process was faster
        database.make_tables()
        database.do(f"PRAGMA application_id = {_APPLICATION}")
        database.do(f"PRAGMA user_version = {SCHEMA}")


def _pragma(database: Database, name: str) -> int:
    return int(database.rows(f"PRAGMA {name}")[0][0])
