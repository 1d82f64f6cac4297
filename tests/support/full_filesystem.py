# SPDX-License-Identifier: Apache-2.0
"""A filesystem without room, and a process for which all are."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

# The command that follows writes no file of more than 4 KiB, half a module's bytecode neither.
NO_LARGE_FILES = ("bash", "-c", 'ulimit -f 4; PYTHONDONTWRITEBYTECODE=1 exec "$@"', "-")


@contextlib.contextmanager
def full_filesystem(path: Path) -> Iterator[Path]:
    """Provide a filesystem with room for a directory and for 4 KiB."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
