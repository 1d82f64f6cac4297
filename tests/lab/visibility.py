# SPDX-License-Identifier: Apache-2.0
"""Makes the checkout and its interpreter reachable for ordinary users inside the lab.

A checkout below root's home cannot be entered by others. Inside the lab's own mount namespace
the closed directory is replaced by an open one that holds only what is needed, at the same path.
"""

import stat
from collections.abc import Iterable
from pathlib import Path

from . import kernel


def first_closed(paths: Iterable[Path]) -> Path | None:
    """The topmost directory on the way to one of these, or itself, that others cannot enter."""
    for path in paths:
        for directory in (*reversed(path.parents), path):
            if not directory.is_dir():
                break
            mode = directory.stat().st_mode
            if not mode & stat.S_IXOTH or (directory == path and not mode & stat.S_IROTH):
                return directory
    return None


def open_up(paths: Iterable[Path], staging: Path) -> None:
    """Replace closed directories until others can reach all these paths."""
    wanted = tuple(paths)
    while (closed := first_closed(wanted)) is not None:
        replace(closed, None, wanted, staging)


def replace(directory: Path, source: Path | None, wanted: Iterable[Path], staging: Path) -> None:
    """Hide a directory behind `source` (None: a new empty one), save for the wanted paths."""
    kept = [path for path in wanted if directory in path.parents and path.exists()]
    if directory in wanted:
        kept += list(directory.iterdir())
    kept = [path for path in kept if not any(other in path.parents for other in kept)]
    staged: list[tuple[Path, Path]] = []
    for index, path in enumerate(dict.fromkeys(kept)):
        aside = staging / str(index)
        place(path, aside)
        staged.append((path, aside))
    if source is None:
        kernel.mount_fresh("tmpfs", directory, "mode=0755")
    else:
        kernel.bind(source, directory)
    for path, aside in staged:
        place(aside, path)
        if not aside.is_symlink():
            kernel.unmount(aside)
        _remove_mount_point(aside)


def place(source: Path, target: Path) -> None:
    """Show the source at the target: a symbolic link as a copy, all else by a mount."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    kernel.bind(source, target)


def _remove_mount_point(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
