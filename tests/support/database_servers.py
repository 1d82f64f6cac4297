# SPDX-License-Identifier: Apache-2.0
"""Real database servers for a test: each on a socket of its own, run by an ordinary user."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 100.0
_USER = "nobody"  # PostgreSQL refuses to run as root


@dataclass(frozen=True)
class Started:
    """A server that runs. `execute` runs statements as its owner."""

    kind: str
    socket: Path
    connect: Callable[[str], Any]

    def execute(self, *statements: str, database: str = "") -> list[Any]:
        """Return what each statement answers."""
        with contextlib.closing(self.connect(database)) as connection:
            cursor = connection.cursor()
            return [_answer(cursor, each) for each in statements]

    @contextlib.contextmanager
    def holding(self, *statements: str, database: str) -> Iterator[None]:
        """Keep a transaction with these statements open."""
        with contextlib.closing(self.connect(database)) as connection:
            for each in ("BEGIN", *statements):
                connection.cursor().execute(each)
            yield
            connection.cursor().execute("ROLLBACK")

    def url(self, user: str, password: str = "", database: str = "health") -> str:
        """Return the URL of a database on it."""
        account = f"{user}:{password}" if password else user
        name = "host" if self.kind == "postgresql" else "unix_socket"
        return f"{self.kind}://{account}@/{database}?{name}={self.socket}"


@contextlib.contextmanager
def postgresql() -> Iterator[Started]:
    """Run a PostgreSQL server; skip the test where there is none."""
    found = shutil.which("initdb", path=_path("/usr/lib/postgresql/*/bin"))
    psycopg = pytest.importorskip("psycopg")
    if found is None:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    programs = Path(found).resolve().parent
    with _directory() as directory:
        data = directory / "data"
        _run(
            [str(programs / "initdb"), "-A", "trust", "-U", "owner", "-E", "UTF8", "-D", str(data)]
        )
        # One account has a password to be wrong about.
        (data / "pg_hba.conf").write_text(
            "local all secretive scram-sha-256\nlocal all all trust\n"
        )
        words = ["-D", data, "-k", directory, "-c", "listen_addresses=", "-c", "fsync=off"]
        with _running([str(programs / "postgres"), *map(str, words)], directory):

            def connect(database: str) -> Any:
                where = {"host": str(directory), "dbname": database or "postgres"}
                return psycopg.connect(user="owner", autocommit=True, **where)

            yield Started("postgresql", directory, connect)


@contextlib.contextmanager
def mariadb() -> Iterator[Started]:
    """Run a MariaDB server; skip the test where there is none."""
    pymysql = pytest.importorskip("pymysql")
    server = shutil.which("mariadbd", path=_path("/usr/sbin"))
    if server is None:
        pytest.skip("no MariaDB here: apt-get install mariadb-server-core")
    with _directory() as directory:
        socket = directory / "socket"
        program = [server, "--no-defaults", f"--datadir={directory}"]
        # What mariadb-install-db does, which needs the client's package too.
        shipped = Path("/usr/share/mysql")
        tables = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
        statements = "".join((shipped / name).read_text() for name in tables)
        _run([*program, "--bootstrap"], f"CREATE DATABASE mysql;\nUSE mysql;\n{statements}")
        words = [f"--socket={socket}", f"--pid-file={directory / 'pid'}", "--skip-networking"]
        with _running([*program, *words], directory):

            def connect(database: str) -> Any:
                where = {"unix_socket": str(socket), "database": database or "mysql"}
                return pymysql.connect(user="root", autocommit=True, **where)

            yield Started("mariadb", socket, connect)


def _answer(cursor: Any, statement: str) -> list[Any]:
    cursor.execute(statement)
    return list(cursor.fetchall()) if cursor.description else []


def _path(pattern: str) -> str:
    directories = [str(each) for each in Path("/").glob(pattern.removeprefix("/"))]
    return ":".join([os.environ["PATH"], *directories])


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """Make a directory that the server's user owns, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="db", ignore_cleanup_errors=True) as scratch:
        if os.getuid() == 0:
            os.chown(scratch, pwd.getpwnam(_USER).pw_uid, -1)
        yield Path(scratch)


def _user() -> dict[str, Any]:
    return {"user": _USER, "extra_groups": []} if os.getuid() == 0 else {}


def _run(words: Sequence[str], typed: str = "") -> None:
    done = subprocess.run(
        words,
        input=typed,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **_user(),
    )
    assert done.returncode == 0, done


@contextlib.contextmanager
def _running(words: Sequence[str], directory: Path) -> Iterator[None]:
    path = directory / "log"
    with (
        path.open("wb") as log,
        subprocess.Popen(words, cwd="/", stdout=log, stderr=log, **_user()) as process,
    ):
        try:
            until_s = time.monotonic() + DEADLINE_S
            # Both say so; a connection that comes too early would be another's to clean up.
            while not re.search(r"ready (to accept|for) connections", path.read_text()):
                assert process.poll() is None, path.read_text()
                assert time.monotonic() < until_s, path.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.terminate()  # both end orderly, and end their connections
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
