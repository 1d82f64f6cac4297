# SPDX-License-Identifier: Apache-2.0
"""Where the index lies, and whether it can be trusted.

Each user has one, in the cache directory of their home. A site may keep one for all, in a file or
on a database server: root writes it, and any user who may read it is answered from it. A file that
another user could have written is never used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from slurm_health.records.errors import IndexUnusable, UsageError

VARIABLE = "SLURM_HEALTH_INDEX"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
class IndexPlace:
    """Where an index is. Without `path` and `server`, it is in memory, and nothing is left of it.

    `named`: a person has chosen the file. `only_read`: it is root's, and another user asks.
    """

    path: Path | None
    server: Server | None = None
    named: bool = False
    only_read: bool = False
    why_in_memory: str = ""

    def __str__(self) -> str:
        return str(self.server or self.path or "in memory")


def choose(
    option: str | None, environ: Mapping[str, str], root: Path, *, site: str | None = None
) -> IndexPlace:
    """Return where the index of the journals below `root` is; the directory of our own is made.

    Args:
        option: a file or a server's URL that the caller names.
        environ: it may name one in SLURM_HEALTH_INDEX.
        root: the journals'.
        site: the one that the site names for all; our own is used where we may not read it.

    Raises:
        IndexUnusable: the file that was named is not to be trusted, or cannot be.
        UsageError: a URL names no server.
    """
    chosen = option or environ.get(VARIABLE) or (site if site and _is_for_us(site) else None)
    if chosen and is_url(chosen):
        return IndexPlace(path=None, server=parsed(chosen))
    path = Path(chosen).expanduser().absolute() if chosen else _default(environ, root)
    if path is None:
        return IndexPlace(path=None, why_in_memory="there is no home directory to keep it in")
    try:
        if not chosen:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return IndexPlace(path=path, named=bool(chosen), only_read=_is_roots(path))
    except (OSError, IndexUnusable) as err:
        if chosen:
            raise _unusable(path, err) from err
        told = f"{path.parent}: {err.strerror}" if isinstance(err, OSError) else str(err)
        return IndexPlace(path=None, why_in_memory=told)


def _is_for_us(site: str) -> bool:
    """Tell whether we may read the site's index, or make it."""
    path = Path(site).expanduser()
    if is_url(site) or os.access(path, os.R_OK):
        return True
    return not os.access(path, os.F_OK) and os.access(path.parent, os.W_OK | os.X_OK)


def _default(environ: Mapping[str, str], root: Path) -> Path | None:
    # One per root: jobs of two roots may have the same ids.
    name = f"history-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}.sqlite"
    cache = environ.get("XDG_CACHE_HOME", "")
    if cache.startswith("/"):
        return Path(cache) / "slurm-health" / name
    try:
        return Path.home() / ".cache" / "slurm-health" / name
    except RuntimeError:
        return None


def _is_roots(path: Path) -> bool:
    """Tell whether this index is one that root keeps for others.

    Raises:
        IndexUnusable: another user could have written it.
        OSError: nothing can be written there, and nothing is there to be read.
    """
    user = os.geteuid()
    parent = path.parent.stat()
    # Who can make files beside it can make SQLite believe that a change was cut short.
    if parent.st_mode & _OTHERS_WRITE or parent.st_uid not in {0, user}:
        raise IndexUnusable(path, f"others than you and root can write {path.parent}")
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
        return False
    if not stat.S_ISREG(found.st_mode):
        raise IndexUnusable(path, "is not a plain file")
    if found.st_uid not in {0, user} or found.st_mode & _OTHERS_WRITE:
        raise IndexUnusable(path, "others than you and root can write it")
    return found.st_uid != user


def _unusable(path: Path, err: Exception) -> IndexUnusable:
    if isinstance(err, IndexUnusable):
        return err
    told = err.strerror or str(err) if isinstance(err, OSError) else str(err)
    return IndexUnusable(path, told)


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
