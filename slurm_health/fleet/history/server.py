# SPDX-License-Identifier: Apache-2.0
"""An index on a PostgreSQL or a MariaDB server that a site has, and how each is reached.

The account that indexes may create tables there; one that may only read is answered from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_health.fleet.history.database import (
    BEGIN,
    PATIENCE_S,
    SCHEMA,
    Busy,
    Codes,
    DamagedIndex,
    Database,
    Denied,
    Dialect,
)
from slurm_health.fleet.history.place import Server, ServerKind
from slurm_health.records.errors import IndexUnusable, PackageMissing

_TABLES = ("slurm_health_seen", "slurm_health_jobs", "slurm_health_index")
_VERSION = "SELECT version FROM slurm_health_index WHERE id = 1"
_OTHER_INDEX = "name another index with --index or SLURM_HEALTH_INDEX"
# Any number that nothing else in the database takes: "shlt".
_POSTGRESQL_LOCK = "SELECT pg_advisory_lock(1936223348)"
_POSTGRESQL_UNLOCK = "SELECT pg_advisory_unlock(1936223348)"
# By SQLSTATE.
_POSTGRESQL_CODES = Codes(
    damaged={"42P01", "42703"}, busy={"55P03", "40P01", "40001"}, denied={"42501", "25006"}
)
_MARIADB_LOCK = f"SELECT GET_LOCK('slurm_health', {PATIENCE_S})"
_MARIADB_UNLOCK = "SELECT RELEASE_LOCK('slurm_health')"
_MARIADB_CODES = Codes(damaged={1146, 1054}, busy={1205, 1213}, denied={1142, 1143, 1290})
_WRONG_PASSWORD = {1045, 1698}
_PASSWORD_FILE = Path("~/.my.cnf")


@dataclass(frozen=True, kw_only=True)
class OnServer:
    """An open index on a server. `only_read`: this account may not change it."""

    database: Database
    only_read: bool


def opened(server: Server) -> OnServer:
    """Connect; where there are no tables, they are made.

    Raises:
        DamagedIndex: the tables are of an older version, or not complete.
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
        raise DamagedIndex("was made by an older version of slurm-health")


def _connected(server: Server) -> Database:
    if server.kind is ServerKind.POSTGRESQL:
        return postgresql(server)
    return mariadb(server)


def _version(database: Database, server: Server) -> int | None:
    """Return the version of the tables, None where there are none.

    Raises:
        IndexUnusable: they are of a newer version, or this account may not read them.
    """
    try:
        found = database.rows(_VERSION)
    except DamagedIndex:  # there is no such table
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
        with contextlib.suppress(
            DamagedIndex, Busy, Denied, IndexUnusable
        ):  # ends with the connection
            database.rows(database.dialect.unlock)


def _may_write(database: Database) -> bool:
    """Tell whether this account may change the index: asked by a change of nothing."""
    try:
        for table in _TABLES[:2]:
            database.do(f"DELETE FROM {table} WHERE 1 = 0")  # noqa: S608 - our names
    except Denied:
        return False
    return True


def postgresql(server: Server) -> Database:
    """Connect to a server. A password that the URL lacks comes from PGPASSWORD or ~/.pgpass.

    Raises:
        IndexUnusable: it cannot be reached, or does not let this account in.
        PackageMissing: the driver is not installed.
    """
    try:
        import psycopg
    except ImportError as err:
        raise PackageMissing(f"--index={server}", "psycopg", "database") from err

    problem = functools.partial(_problem_of_postgresql, server)
    try:
        connection = psycopg.connect(
            dbname=server.database,
            autocommit=True,
            connect_timeout=PATIENCE_S,
            application_name="slurm-health",
            # Without a host, the driver looks where PGHOST or the distribution says.
            **server.named,
        )
        # What a crash of the server loses is indexed again. Not as options of the connection: a
        # pooler between refuses those.
        connection.execute(f"SET lock_timeout = '{PATIENCE_S}s'")
        connection.execute("SET synchronous_commit = off")
        connection.execute("SET client_min_messages = error")
    except psycopg.Error as err:
        raise problem(err) from err
    dialect = Dialect(
        value="%s",
        begin=BEGIN,
        text="TEXT",
        binary="BYTEA",
        options="",
        errors=(psycopg.Error,),
        problem=problem,
        lock=_POSTGRESQL_LOCK,
        unlock=_POSTGRESQL_UNLOCK,
    )
    return Database(connection, dialect)


def _problem_of_postgresql(server: Server, err: Exception) -> Exception:
    said = server.hidden(str(err))
    if meaning := _POSTGRESQL_CODES.meaning(getattr(err, "sqlstate", None) or "", said):
        return meaning
    fix = _OTHER_INDEX
    if "password" in said:
        fix = "give the account's password in PGPASSWORD or ~/.pgpass"
    return IndexUnusable(str(server), said, fix=fix)


def mariadb(server: Server) -> Database:
    """Connect to a server. A password that the URL lacks comes from ~/.my.cnf.

    Raises:
        IndexUnusable: it cannot be reached, or does not let this account in.
        PackageMissing: the driver is not installed.
    """
    try:
        import pymysql
    except ImportError as err:
        raise PackageMissing(f"--index={server}", "pymysql", "database") from err

    problem = functools.partial(_problem_of_mariadb, server)
    file = _PASSWORD_FILE.expanduser()
    try:
        connection = pymysql.connect(
            database=server.database,
            autocommit=True,
            charset="utf8mb4",
            connect_timeout=PATIENCE_S,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            read_default_file=str(file) if file.is_file() else None,
            **server.named,
        )
        # Of rows, and of whole tables, for which it would wait a day.
        connection.cursor().execute(
            f"SET SESSION innodb_lock_wait_timeout = {PATIENCE_S},"
            f" SESSION lock_wait_timeout = {PATIENCE_S}"
        )
    except (pymysql.Error, OSError) as err:
        raise problem(err) from err
    dialect = Dialect(
        value="%s",
        begin=BEGIN,
        text="TEXT",
        binary="MEDIUMBLOB",
        # Names are compared byte by byte, as everywhere else.
        options=" ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
        errors=(pymysql.Error,),
        problem=problem,
        lock=_MARIADB_LOCK,
        unlock=_MARIADB_UNLOCK,
    )
    return Database(connection, dialect)


def _problem_of_mariadb(server: Server, err: Exception) -> Exception:
    code = err.args[0] if err.args else 0
    said = server.hidden(str(err.args[-1] if err.args else err))
    if meaning := _MARIADB_CODES.meaning(code, said):
        return meaning
    fix = _OTHER_INDEX
    if code in _WRONG_PASSWORD:
        fix = "give the account's password under [client] in ~/.my.cnf"
    return IndexUnusable(str(server), said, fix=fix)
