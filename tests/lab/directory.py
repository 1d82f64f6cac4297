# SPDX-License-Identifier: Apache-2.0
"""Lab directories under one base: taken, found, and swept when their lab is dead.

A lab's directory carries a lock (flock) that its keeper and init hold all their lives, so the
lock tells exactly whether the lab lives, whatever became of process ids.
"""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from . import cgroups
from .errors import LabError
from .layout import BASE

_ATTEMPTS = 20


def take(root: Path) -> int:
    """Make the directory and lock it; what a dead lab of that name left is removed first."""
    for _ in range(_ATTEMPTS):
        root.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            root.mkdir(mode=0o755)
        except FileExistsError:
            if not sweep_if_dead(root):
                raise LabError(
                    f"a lab named {root.name!r} is running (python -m tests.lab down"
                    f" --name {root.name})"
                ) from None
            continue
        except FileNotFoundError:  # another lab's end removed the empty base
            continue
        lock = _lock(root)
        if lock is not None:
            root.chmod(0o755)  # whatever the umask
            root.parent.chmod(0o755)
            return lock
    raise LabError(f"{root} is made and removed by others all the time")


def sweep(root: Path) -> None:
    """Remove the files and cgroups of a lab whose processes are gone."""
    controller = cgroups.find_cpu_controller()
    if controller is not None:
        cgroups.remove(controller, root.name)
    shutil.rmtree(root, ignore_errors=True)
    with suppress(OSError):
        root.parent.rmdir()


def sweep_dead() -> None:
    for root in _roots():
        sweep_if_dead(root)


def living() -> tuple[str, ...]:
    return tuple(root.name for root in _roots() if is_alive(root))


def is_alive(root: Path) -> bool:
    lock = _lock(root)
    if lock is None:
        return root.is_dir()
    os.close(lock)
    return False


def await_end(root: Path, deadline_s: float) -> bool:
    """Wait until no process of the lab lives; False when some still do."""
    end_s = time.monotonic() + deadline_s
    while is_alive(root):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def await_none(prefix: str, deadline_s: float) -> bool:
    """Wait until no lab lives whose name begins so; False when one still does."""
    end_s = time.monotonic() + deadline_s
    while any(name.startswith(prefix) for name in living()):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def sweep_if_dead(root: Path) -> bool:
    """Remove the directory and cgroups of a lab that is dead; False when it lives."""
    lock = _lock(root)
    if lock is None:
        return not root.is_dir()
    sweep(root)
    os.close(lock)
    return True


def _roots() -> list[Path]:
    return sorted(path for path in BASE.glob("*") if path.is_dir())


def _lock(root: Path) -> int | None:
    """Lock the directory; None if others hold it, or if it was removed meanwhile."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if root.stat().st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None
