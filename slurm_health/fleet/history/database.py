# SPDX-License-Identifier: Apache-2.0
"""The database that an index lies in: SQLite, PostgreSQL and MariaDB are asked in one way.

What differs between them is a `Dialect`. Queries are written with `?` for values, and in the SQL
that all three understand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


class Damaged(Exception):
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
            return Damaged(said)
        if code in self.busy:
            return Busy(said)
        return Denied(said) if code in self.denied else None


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of database differs from the others.

    `value` stands for a value in a statement. `begin` starts a transaction that no other change
    runs beside; `lock` and `unlock` do likewise before there is any table. `problem` returns what
    an error of the driver means: Damaged, Busy, Denied or IndexUnusable. `errors` are the classes
    of the driver's errors.
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
