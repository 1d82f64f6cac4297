# SPDX-License-Identifier: Apache-2.0
"""The site's file as TOML: read in one way by every command and by the hooks.

Five keys are for everybody; the tables are the administrator's, and what runs as root checks them
to the last key (`slurm_health.node.site`). A mistake is an error that names its line.
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
# Of what the site publishes: every node of the largest cluster, with a hundred bytes each, is a
# tenth of this.
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
_KEYS = ("journal", "standings", "expectations", "localize", *_ADMIN_TABLES)
_TEXTS = {
    "journal": "a directory",
    "standings": "a file, with its whole path",
}


class SiteFile:
    """What the file says, and where in it each key stands."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._lines = text.splitlines()
        import tomllib  # not free, and most who look for the file find none

        try:
            self.document: dict[str, Any] = tomllib.loads(text)
        except (ValueError, RecursionError) as err:  # also of a number or a nest without end
            raise ConfigError(str(path), "", f"is not TOML: {err}") from err
        for key in self.document:
            if key not in _KEYS:
                raise self.error((), key, "unknown setting", valid=_KEYS)
        for key, wanted in _TEXTS.items():
            found = self.document.get(key, "/")
            usable = isinstance(found, str) and found
            if not usable or (key == "standings" and not found.startswith("/")):
                raise self.error((), key, f"expected {wanted}, found {found!r}")

    def table(self, *where: str) -> dict[str, Any]:
        """Return a table of the file, an empty one where it has none.

        Raises:
            ConfigError: that is no table.
        """
        found = self.document
        for depth, key in enumerate(where):
            found = found.get(key, {})
            if not isinstance(found, dict):
                raise self.error(where[:depth], key, f"expected a table, found {found!r}")
        return found

    def error(
        self, where: tuple[str, ...], key: str, problem: str, *, valid: tuple[str, ...] = ()
    ) -> ConfigError:
        """Return the error that a key, or without one a whole table, is."""
        line = self.line(where, key)
        return ConfigError(f"{self.path}:{line}", key or ".".join(where), problem, valid=valid)

    def line(self, where: tuple[str, ...], key: str = "") -> int:
        """Return where a key, or a table's header, stands; the nearest thing that can be found."""
        header = ".".join(where)
        if not key:
            return self._headers.get(header, 1)
        wanted = f"{header}.{key}" if header else key
        setting = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]")
        table, header_line = "", 1
        for number, line in enumerate(self._lines, 1):
            if line.lstrip()[:1] == "[" and (found := _HEADER.match(line)):
                table = _QUOTES.sub("", found.group(1))
                if table == wanted:
                    return number
                if table == header:
                    header_line = number
            elif table == header and setting.match(line):
                return number
        return header_line

    @cached_property
    def _headers(self) -> dict[str, int]:
        """Where the first header of each table stands: hooks ask for it with every check."""
        found: dict[str, int] = {}
        for number, line in enumerate(self._lines, 1):
            if line.lstrip()[:1] == "[" and (header := _HEADER.match(line)):
                found.setdefault(_QUOTES.sub("", header.group(1)), number)
        return found


def read(path: Path, *, trusted: bool) -> SiteFile:
    """Read the site's file.

    Args:
        path: of the file.
        trusted: refuse a file that others than root, or whoever asks, can write: root acts on it.

    Raises:
        ConfigError: it cannot be read or trusted, or is not what a site's file is.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read()
    except OSError as err:
        raise ConfigError(str(path), "", f"cannot be read: {err.strerror}") from err
    if trusted:
        _refuse_writable(path, path, found)
        for place in path.absolute().parents:
            _refuse_writable(path, place, place.stat())
    try:
        return SiteFile(path, data.decode())
    except UnicodeDecodeError as err:
        raise ConfigError(str(path), "", f"is not UTF-8: {err}") from err


def others_can_write(found: os.stat_result) -> bool:
    """Tell whether others than root, or whoever asks, can change a file or directory."""
    is_ours = found.st_uid in {0, os.getuid()}
    return not is_ours or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _refuse_writable(path: Path, place: Path, found: os.stat_result) -> None:
    # In a sticky directory, as /tmp is, others may add names, and replace none of root's.
    sticky = place != path and place != path.parent and found.st_mode & stat.S_ISVTX
    if others_can_write(found) and not (sticky and found.st_uid in {0, os.getuid()}):
        problem = "can be written by others than root, so root does not follow it"
        key = "" if place == path else str(place)
        raise ConfigError(str(path), key, f"{problem}; fix: chown root, chmod go-w")


def content_of(path: Path) -> bytes:
    """Return what a file holds that the site publishes for its jobs.

    Raises:
        OSError: it cannot be read, or others than root and this user could have written it.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        if others_can_write(found):
            raise PermissionError(errno.EPERM, "others than root and you can write it")
        if found.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, limit {_MOST_BYTES}")
        return file.read(_MOST_BYTES)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; whoever opens a FIFO otherwise waits for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
