# SPDX-License-Identifier: Apache-2.0
"""How a PostgreSQL server is reached, and what its errors mean."""

from __future__ import annotations

from slurm_health.fleet.history.database import BEGIN, PATIENCE_S, Codes, Database, Dialect
from slurm_health.fleet.history.server_url import Server
from slurm_health.records.errors import IndexUnusable, PackageMissing

# Any number that nothing else in the database takes: "shlt".
_LOCK = "SELECT pg_advisory_lock(1936223348)"
_UNLOCK = "SELECT pg_advisory_unlock(1936223348)"
# By SQLSTATE.
_CODES = Codes(
    damaged={"42P01", "42703"}, busy={"55P03", "40P01", "40001"}, denied={"42501", "25006"}
)


def connected(server: Server) -> Database:
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
        return _CODES.meaning(state, said) or IndexUnusable(str(server), said, fix=_fix(said))

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
        lock=_LOCK,
        unlock=_UNLOCK,
    )
    return Database(connection, dialect)


def _fix(said: str) -> str:
    if "password" in said:
        return "give the account's password in PGPASSWORD or ~/.pgpass"
    return "name another index with --index or SLURM_HEALTH_INDEX"
