# SPDX-License-Identifier: Apache-2.0
"""How a MariaDB server is reached, and what its errors mean."""

from __future__ import annotations

from pathlib import Path

from slurm_health.fleet.history.database import BEGIN, PATIENCE_S, Codes, Database, Dialect
from slurm_health.fleet.history.server_url import Server
from slurm_health.records.errors import IndexUnusable, PackageMissing

_LOCK = f"SELECT GET_LOCK('slurm_health', {PATIENCE_S})"
_UNLOCK = "SELECT RELEASE_LOCK('slurm_health')"
_CODES = Codes(damaged={1146, 1054}, busy={1205, 1213}, denied={1142, 1143, 1290})
_WRONG_PASSWORD = {1045, 1698}
_PASSWORD_FILE = Path("~/.my.cnf")


def connected(server: Server) -> Database:
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
        if meaning := _CODES.meaning(code, said):
            return meaning
        fix = "name another index with --index or SLURM_HEALTH_INDEX"
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
        lock=_LOCK,
        unlock=_UNLOCK,
    )
    return Database(connection, dialect)
