# SPDX-License-Identifier: Apache-2.0
"""The config file as TOML: one reader for every command and for the hooks.

Six keys are for every user; the tables are the administrator's, and root's programs check them to
the last key (`slurm_health.node.site`). A mistake is an error that names its line.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from functools import cached_property
from pathlib import Path
from typing import Any

from slurm_health.records.errors import ConfigError

SITE_FILE = "/etc/slurm-health/config.toml"
# Of a file that the site publishes: every node of the largest cluster, with a hundred bytes per
# node, is a tenth of this.
_MOST_BYTES = 1 << 26
_ADMIN_TABLES = (
    "hooks",
    "breaker",
    "recovery",
    "accusations",
    "sweep",
    "default",
    "metrics",
    "notify",
    "repair",
    "checks",
)
_HEADER, _QUOTES = re.compile(r"\s*\[\s*([^]]+?)\s*\]"), re.compile(r"[\"'\s]")
_KEYS = ("journal", "standings", "paths", "expectations", "localize", *_ADMIN_TABLES)
_TEXTS = {
    "journal": "a directory",
    "standings": "a file, with its whole path",
}


class SiteFile:
    """The content of the file, and the lines of its keys."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._lines = text.splitlines()
        import tomllib  # slow to load, and most sites have no file

        try:
            self.document: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as err:  # also of a number or a nest without end
            raise ConfigError(str(path), "", f"is not TOML: {err}") from err
        for key in self.document:
            if key not in _KEYS:
                raise self.error((), key, "unknown setting", valid=_KEYS)
        for key, wanted in _TEXTS.items():
            value = self.document.get(key, "/")
            usable = isinstance(value, str) and value
            if not usable or (key == "standings" and not value.startswith("/")):
                raise self.error((), key, f"expected {wanted}, found {value!r}")
        paths = self.document.get("paths", [])
        listed = isinstance(paths, list) and all(str(path)[:1] in {"/", "~"} for path in paths)
        if not listed:
            raise self.error((), "paths", f"expected a list of directories, found {paths!r}")

    def table(self, *where: str) -> dict[str, Any]:
        """Return a table of the file, an empty one if it has none.

        Raises:
            ConfigError: the key is no table.
        """
        table = self.document
        for depth, key in enumerate(where):
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise self.error(where[:depth], key, f"expected a table, found {table!r}")
        return table

    def error(
        self, where: tuple[str, ...], key: str, problem: str, *, valid: tuple[str, ...] = ()
    ) -> ConfigError:
        """Return an error about a key; without one, about the whole table."""
        line = self.line(where, key)
        return ConfigError(f"{self.path}:{line}", key or ".".join(where), problem, valid=valid)

    def line(self, where: tuple[str, ...], key: str = "") -> int:
        """Return the line of a key, or of a table's header; else of the nearest header."""
        header = ".".join(where)
        if not key:
            return self._first_headers.get(header, 1)
        wanted = f"{header}.{key}" if header else key
        setting = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]")
        table, header_line = "", 1
        headers = dict(self._headers)
        for number, line in enumerate(self._lines, 1):
            if number in headers:
                table = headers[number]
                if table == wanted:
                    return number
                if table == header:
                    header_line = number
            elif table == header and setting.match(line):
                return number
        return header_line

    @cached_property
    def _headers(self) -> list[tuple[int, str]]:
        """The lines of the tables' headers: hooks look one up for every check."""
        return [
            (number, _QUOTES.sub("", match.group(1)))
            for number, line in enumerate(self._lines, 1)
            if line.lstrip()[:1] == "[" and (match := _HEADER.match(line))
        ]

    @cached_property
    def _first_headers(self) -> dict[str, int]:
        return {name: number for number, name in reversed(self._headers)}


def read(path: Path, *, trusted: bool) -> SiteFile:
    """Read the config file.

    Args:
        path: of the file.
        trusted: refuse a file that others than root and this user can write: root acts on it.

    Raises:
        ConfigError: it cannot be read or trusted, or has an unknown key.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as err:
        raise ConfigError(str(path), "", f"cannot be read: {err.strerror}") from err
    if trusted:
        parents = path.absolute().parents
        for place, own in ((path, status), *((place, place.stat()) for place in parents)):
            # In a sticky directory, as /tmp is, others may add names, and replace none of root's.
            sticky = place != path and place != path.parent and own.st_mode & stat.S_ISVTX
            if others_can_write(own) and not (sticky and own.st_uid in {0, os.getuid()}):
                problem = "can be written by others than root, so root does not follow it"
                key = "" if place == path else str(place)
                raise ConfigError(str(path), key, f"{problem}; fix: chown root, chmod go-w")
    try:
        return SiteFile(path, data.decode())
    except UnicodeDecodeError as err:
        raise ConfigError(str(path), "", f"is not UTF-8: {err}") from err


def others_can_write(status: os.stat_result) -> bool:
    """Return whether others than root and this user can change a file or directory."""
    is_ours = status.st_uid in {0, os.getuid()}
    return not is_ours or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def content_of(path: Path) -> bytes:
    """Return the content of a file that the site publishes for its jobs.

    Raises:
        OSError: it cannot be read, or others than root and this user could have written it.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        if others_can_write(status):
            raise PermissionError(errno.EPERM, "others than root and you can write it")
        if status.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, limit {_MOST_BYTES}")
        return file.read(_MOST_BYTES)
