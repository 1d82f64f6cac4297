# SPDX-License-Identifier: Apache-2.0
"""An index on a PostgreSQL or a MariaDB server that a site has.

Whoever indexes may create tables there; who may only read them is answered from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_health.fleet.history import drivers
from slurm_health.fleet.history.database import SCHEMA, Busy, Damaged, Database, Denied
from slurm_health.fleet.history.server_url import Kind, Server
from slurm_health.records.errors import IndexUnusable

_TABLES = ("slurm_health_seen", "slurm_health_jobs", "slurm_health_index")
_VERSION = "SELECT version FROM slurm_health_index WHERE id = 1"


@dataclass(frozen=True, kw_only=True)
class OnServer:
    """An open index on a server. `only_read`: this account may not change it."""

    database: Database
    only_read: bool


def opened(server: Server) -> OnServer:
    """Connect; where there are no tables, they are made.

    Raises:
        Damaged: the tables are of an older version, or not complete.
        Busy: another process has held them for too long.
        IndexUnusable: the server cannot be reached, or lets this account do nothing.
        PackageMissing: the driver of this kind of server is not installed.
    """
    database = _connected(server)
    try:
        _prepare(database, server)
        return OnServer(database=database, only_read=not _may_write(database))
    except BaseException:
        database.close()
        raise


def remove(server: Server) -> None:
    """Remove the tables, so that the next who may makes them anew.

    Raises:
        Busy: another process has held them for too long.
        IndexUnusable: this account may not.
    """
    database = _connected(server)
    try:
        _version(database, server)
        for table in _TABLES:
            database.do(f"DROP TABLE IF EXISTS {table}")
    except Denied as err:
        fix = "let the account that owns its tables make it anew with --rebuild"
        raise IndexUnusable(str(server), str(err), fix=fix) from err
    finally:
        database.close()


def _prepare(database: Database, server: Server) -> None:
    version = _version(database, server)
    if version is None:
        _make(database, server)
    elif version < SCHEMA:
        raise Damaged("was made by an older version of slurm-health")


def _connected(server: Server) -> Database:
    if server.kind is Kind.POSTGRESQL:
        return drivers.postgresql(server)
    return drivers.mariadb(server)


def _version(database: Database, server: Server) -> int | None:
    """Return the version of the tables, None where there are none.

    Raises:
        IndexUnusable: they are of a newer version, or this account may not read them.
    """
    try:
        found = database.rows(_VERSION)
    except Damaged:  # there is no such table
        return None
    except Denied as err:
        raise IndexUnusable(str(server), str(err), fix="let this account read its tables") from err
    version = int(found[0][0]) if found else None
    if version is not None and version > SCHEMA:
        raise IndexUnusable(str(server), "was made by a newer slurm-health", fix="upgrade this one")
    return version


def _make(database: Database, server: Server) -> None:
    try:
        with _alone(database):
            if _version(database, server) is not None:
                return  # another process was faster
            for table in _TABLES:
                database.do(f"DROP TABLE IF EXISTS {table}")  # what one that was killed has left
            database.make_tables()
            database.do("CREATE TABLE slurm_health_index (id INTEGER PRIMARY KEY, version INTEGER)")
            database.do("INSERT INTO slurm_health_index VALUES (1, ?)", (SCHEMA,))
    except Denied as err:
        fix = f"let this account create tables in the database {server.database}"
        raise IndexUnusable(str(server), f"has no tables yet, and {err}", fix=fix) from err


@contextlib.contextmanager
def _alone(database: Database) -> Iterator[None]:
    """Hold a lock of the server's that is not a table's, as there is none yet."""
    if database.rows(database.dialect.lock) == [
        (0,)
    ]:  # MariaDB's word for a wait that was too long
        raise Busy("another process makes its tables")
    try:
        yield
    finally:
        with contextlib.suppress(Damaged, Busy, Denied, IndexUnusable):  # ends with the connection
            database.rows(database.dialect.unlock)


def _may_write(database: Database) -> bool:
    """Tell whether this account may change the index: asked by a change of nothing."""
    try:
        for table in _TABLES[:2]:
            database.do(f"DELETE FROM {table} WHERE 1 = 0")  # noqa: S608 - our names
    except Denied:
        return False
    return True
