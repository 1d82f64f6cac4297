# SPDX-License-Identifier: Apache-2.0
"""The URL of a database: `postgresql://USER@HOST/DATABASE`, or `mariadb:` likewise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from slurm_health.records.errors import UsageError


class ServerKind(Enum):
    """A server that an index can lie on."""

    POSTGRESQL = "postgresql"
    MARIADB = "mariadb"


_KINDS = {
    "postgresql": ServerKind.POSTGRESQL,
    "postgres": ServerKind.POSTGRESQL,
    "mariadb": ServerKind.MARIADB,
    "mysql": ServerKind.MARIADB,
}
_OPTIONS = {
    ServerKind.POSTGRESQL: ("host", "sslmode", "sslrootcert", "sslcert", "sslkey", "passfile"),
    ServerKind.MARIADB: ("unix_socket", "ssl_ca", "ssl_cert", "ssl_key"),
}
_EXAMPLE = "e.g. postgresql://USER@HOST/DATABASE or mariadb://USER@HOST/DATABASE"


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a database is. As text, it has no password."""

    kind: ServerKind
    database: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Any]:
        """What a driver is to be told, by the names that it has for it, but for the database."""
        named = {"host": self.host, "port": self.port, "user": self.user, "password": self.password}
        return {key: value for key, value in {**named, **self.options}.items() if value}

    def hidden(self, text: str) -> str:
        """Return a text in one line and without the password."""
        line = " ".join(text.split())
        return line.replace(self.password, "***") if self.password else line

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{self.kind.value}://{user}{self.host}{port}/{self.database}"


def is_url(text: str) -> bool:
    """Tell whether this names a server and not a file."""
    return "://" in text


def parsed(text: str) -> Server:
    """Return the server that a URL names.

    Raises:
        UsageError: it names none. The message does not repeat it: it may hold a password.
    """
    scheme = text.split("://", maxsplit=1)[0]
    kind = _KINDS.get(scheme)
    if kind is None:
        raise UsageError(f"--index: no database is known as {scheme}://; {_EXAMPLE}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as err:  # its text may repeat the URL
        raise UsageError(
            "--index: the URL has no valid host and port; in a password, write @ as %40, : as %3A,"
            f" / as %2F; {_EXAMPLE}"
        ) from err
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise UsageError(f"--index: the URL must name one database; {_EXAMPLE}")
    options = dict(parse_qsl(parts.query))
    for name in options:
        if name not in _OPTIONS[kind]:
            known = ", ".join(_OPTIONS[kind])
            raise UsageError(f"--index: unknown option {name!r} in the URL (known: {known})")
    return Server(
        kind=kind,
        database=database,
        host=host,
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        options=options,
    )
