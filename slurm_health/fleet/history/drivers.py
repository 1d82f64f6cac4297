# SPDX-License-Identifier: Apache-2.0
"""How a PostgreSQL and a MariaDB server are reached, and what their errors mean."""

from __future__ import annotations

from pathlib import Path

from slurm_health.fleet.history.database import BEGIN, PATIENCE_S, Codes, Database, Dialect
from slurm_health.fleet.history.server_url import Server
from slurm_health.records.errors import IndexUnusable, PackageMissing

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

    def problem(err: Exception) -> Exception:
        state = getattr(err, "sqlstate", None) or ""
        said = server.hidden(str(err))
        return _POSTGRESQL_CODES.meaning(state, said) or IndexUnusable(
            str(server), said, fix=_fix(said)
        )

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


def _fix(said: str) -> str:
    if "password" in said:
        return "give the account's password in PGPASSWORD or ~/.pgpass"
    return _OTHER_INDEX


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

    def problem(err: Exception) -> Exception:
        code = err.args[0] if err.args else 0
        said = server.hidden(str(err.args[-1] if err.args else err))
        if meaning := _MARIADB_CODES.meaning(code, said):
            return meaning
        fix = _OTHER_INDEX
        if code in _WRONG_PASSWORD:
            fix = "give the account's password under [client] in ~/.my.cnf"
        return IndexUnusable(str(server), said, fix=fix)

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
