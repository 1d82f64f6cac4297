# SPDX-License-Identifier: Apache-2.0
"""A filesystem without room or programs, and a process for which all are without room."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

# The command that follows writes no file of more than 4 KiB, half a module's bytecode neither.
NO_LARGE_FILES = ("bash", "-c", 'ulimit -f 4; PYTHONDONTWRITEBYTECODE=1 exec "$@"', "-")


def full_filesystem(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Provide a filesystem with room for a directory and for 4 KiB."""
    return _in_memory(path, "size=4k")


def noexec_filesystem(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Provide a filesystem from which nothing can be executed."""
    return _in_memory(path, "noexec,size=1m")


@contextlib.contextmanager
def _in_memory(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
