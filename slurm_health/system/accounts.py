# SPDX-License-Identifier: Apache-2.0
"""Whose a user id is: those that /etc/subuid gives a user for containers are that user's too.

With them one user can own files, and call at a socket, as tens of thousands of others (subuid(5)).
"""

from __future__ import annotations

import contextlib
import pwd
from pathlib import Path
from typing import NamedTuple

_FILE = Path("/etc/subuid")


class _Range(NamedTuple):
    """Ids that belong to a user, who is named or numbered."""

    first: int
    last: int
    user: str


class Accounts:
    """Tells whose ids are. The file is read again when it has changed."""

    def __init__(self, file: Path = _FILE) -> None:
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._ranges: list[_Range] = []

    def user(self, uid: int) -> int:
        """Return the user that an id is of, the id itself where no user was given it.

        What root was given for its containers is not root.
        """
        self._read()
        for each in self._ranges:
            if each.first <= uid <= each.last:
                return _uid_of(each.user) or uid
        return uid

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # most machines have none
            found = self._file.stat()
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
            if stamp != self._stamp:
                self._ranges = _ranges(self._file.read_text(errors="replace"))
                self._stamp = stamp


def _ranges(text: str) -> list[_Range]:
    found = []
    for line in text.splitlines():
        user, first, count = (*line.strip().split(":"), "", "")[:3]
        if user and first.isdecimal() and count.isdecimal():
            found.append(_Range(int(first), int(first) + int(count) - 1, user))
    return found


def _uid_of(user: str) -> int | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(user).pw_uid
    return int(user) if user.isdecimal() else None
