# SPDX-License-Identifier: Apache-2.0
"""Owners of user ids: the ids that /etc/subuid gives a user for containers are that user's too.

With them one user can own files, and connect to a socket, as tens of thousands of others
(subuid(5)).
"""

from __future__ import annotations

import contextlib
import pwd
from pathlib import Path

_FILE = Path("/etc/subuid")


class Accounts:
    """Looks up owners of ids. The file is read again after a change."""

    def __init__(self, file: Path = _FILE) -> None:
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._owners: list[tuple[range, str]] = []

    def user(self, uid: int) -> int:
        """Return the user who owns an id, by default the id itself.

        The ids of root's containers are not root.
        """
        with contextlib.suppress(OSError):  # most machines have no such file
            status = self._file.stat()
            stamp = status.st_ino, status.st_mtime_ns, status.st_size
            if stamp != self._stamp:
                self._owners = _owners(self._file.read_text(errors="replace"))
                self._stamp = stamp
        name = next((name for ids, name in self._owners if uid in ids), "")
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid or uid
        return int(name) or uid if name.isdecimal() else uid


def _owners(text: str) -> list[tuple[range, str]]:
    """Return the ranges of ids in a file, with their owners' names or numbers."""
    owners = []
    for line in text.splitlines():
        user, first, count = (*line.strip().split(":"), "", "")[:3]
        if user and first.isdecimal() and count.isdecimal():
            owners.append((range(int(first), int(first) + int(count)), user))
    return owners
