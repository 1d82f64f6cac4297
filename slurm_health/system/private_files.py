# SPDX-License-Identifier: Apache-2.0
"""Files that only one user can have made or changed, in any place.

Journals may lie where any user can make directories, root reads the files of users, and commands
from a journal are run. So below its root no link is followed, only directories and plain files are
opened, and none that another user could have made or can change. A refusal is a PermissionError
that says why.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

# The journal of a check of 4,096 nodes over 100 rounds has some 40 MB in its largest file.
MOST_BYTES = 1 << 28
_MOST_NAMES = 10_000
# O_PATH: the directory is looked up and not read, which costs a network filesystem nothing more.
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Without setuid, setgid and sticky, which a file that root writes must never have.
_PERMISSION = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Directories for a script while it runs; None is TMPDIR.
_TEMPORARY_PLACES = (None, "/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a new directory in each


@contextlib.contextmanager
def directory(
    root: Path, shared: str, *own: str, owner: int | None, make: bool = False
) -> Iterator[int]:
    """Hold open the directory `root`/`shared`/`own`....

    Any user may have a directory in `shared`, as in `/tmp`; only one user can change those in
    `own`.

    Args:
        root: links are still followed up to here: the site or the user has chosen it.
        shared: the name of a directory there.
        own: the names of directories below it, outermost first.
        owner: who must own them; None for the owner of the first one.
        make: make missing directories, closed to others whatever the umask.

    Raises:
        PermissionError: it is refused.
        OSError: it cannot be opened, or not be made.
    """
    if make:
        for missing in reversed([path for path in (root, *root.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        handle = os.open(root, _DIRECTORY)
        stack.callback(os.close, handle)
        keepers = {0, os.fstat(handle).st_uid, owner}
        for depth, name in enumerate((shared, *own)):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=handle)
            path = "/".join((shared, *own)[: depth + 1])
            handle = _below(handle, name, path)
            stack.callback(os.close, handle)
            status = os.fstat(handle)
            if depth > 0:
                owner = status.st_uid if owner is None else owner
                _refuse(status, owner, path)
                continue
            # Its owner, and without the sticky bit any writer, may rename directories in it.
            if owner is not None and status.st_uid not in keepers:
                raise PermissionError(errno.EPERM, f"{path} belongs to user {status.st_uid}")
            if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
                text = f"others can write {path}: chmod +t or go-w is needed"
                raise PermissionError(errno.EPERM, text)
        yield handle


@contextlib.contextmanager
def opened(
    handle: int, name: str, flags: int = os.O_RDONLY, *, make: bool = False
) -> Iterator[int]:
    """Hold open a plain file in an open directory, of the same owner.

    Raises:
        PermissionError: it is refused.
        OSError: it cannot be opened, or with `make` not be made.
    """
    file = -1
    if make:  # closed to others whatever the umask
        with contextlib.suppress(FileExistsError):
            file = os.open(name, flags | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=handle)
    if file < 0:
        file = os.open(name, flags | _FILE, dir_fd=handle)
    try:
        _accepted(file, handle, name)
        yield file
    finally:
        os.close(file)


def _accepted(file: int, handle: int, name: str, owner: int | None = None) -> os.stat_result:
    """Return the status of an open file: plain, and of the same owner as its directory."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"{name} is not a plain file with one name")
    _refuse(status, os.fstat(handle).st_uid if owner is None else owner, name)
    return status


def read(
    handle: int,
    name: str,
    *,
    offset: int = 0,
    most_bytes: int = MOST_BYTES,
    owner: int | None = None,
) -> bytes:
    """Return the content of a file in an open directory from `offset` on.

    With `owner`, the directory's owner is not looked up again: for thousands of files in one.

    Raises:
        PermissionError: it is refused.
        OSError: it cannot be read, or has more than `most_bytes`.
    """
    file = os.open(name, _FILE, dir_fd=handle)  # not `opened`: thousands are read one after another
    try:
        size = _accepted(file, handle, name, owner).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"{name} has {size} bytes, limit {most_bytes}")
        data = b""
        while offset + len(data) < size:
            piece = os.pread(file, size - offset - len(data), offset + len(data))
            if not piece:
                break  # it was truncated meanwhile
            data += piece
        return data
    finally:
        os.close(file)


@contextlib.contextmanager
def entries(handle: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List an open directory, for as long as its entries are used.

    Raises:
        OSError: it cannot be read.
    """
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        with os.scandir(listing) as names:
            yield names
    finally:
        os.close(listing)


def directories_in(handle: int) -> list[str]:
    """Return the names of directories, not links, in an open directory, up to a limit.

    Raises:
        OSError: it cannot be read.
    """
    with entries(handle) as names:
        some = itertools.islice(names, _MOST_NAMES)
        return [entry.name for entry in some if entry.is_dir(follow_symlinks=False)]


@contextlib.contextmanager
def temporary(name: str, data: bytes, *, mode: int = 0o600) -> Iterator[Path]:
    """Provide a file with this name and content, in a directory of its own with room for it.

    Raises:
        OSError: no temporary directory has room for it.
    """
    import tempfile  # slow to load, and the hooks only read

    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with contextlib.ExitStack() as stack:
        for place in _TEMPORARY_PLACES:
            try:
                own = tempfile.TemporaryDirectory(
                    prefix="slurm-health-", dir=place, ignore_cleanup_errors=True
                )
                path = Path(stack.enter_context(own), name)
                path.write_bytes(data)
                path.chmod(mode)
            except OSError as err:
                failure = err
            else:
                break
        else:
            raise failure
        yield path


def publish(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file so that a reader gets the old one or the new one, whole.

    Others may be able to write in its directory, such as the account of a metrics exporter: the new
    file has a random name, must not exist before, and has its mode before it gets its name. A link
    at `path` is replaced, and never followed; the mode of the old file is not copied.

    Raises:
        ValueError: the mode has bits other than those of permission.
        OSError: it cannot be written.
    """
    if mode & ~_PERMISSION:
        raise ValueError(f"{path} must not be published with mode {mode:#o}")
    handle = os.open(path.parent, _DIRECTORY)
    try:
        fresh = f".{path.name}.{os.urandom(8).hex()}"
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=handle)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(file, mode)
                os.fsync(file)
            os.rename(fresh, path.name, src_dir_fd=handle, dst_dir_fd=handle)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=handle)
            raise
    finally:
        os.close(handle)


def is_own_directory(status: os.stat_result, owner: int) -> bool:
    """Return whether this is a directory that only its owner can change."""
    own = status.st_uid == owner and not status.st_mode & _OTHERS_WRITE
    return own and stat.S_ISDIR(status.st_mode)


def _below(handle: int, name: str, path: str) -> int:
    """Open a directory that is no link; `path` is its name in a refusal."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
    except NotADirectoryError as err:
        owner = os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid
        text = f"{path} is a link or a file, and belongs to user {owner}"
        raise PermissionError(errno.EPERM, text) from err


def _refuse(status: os.stat_result, owner: int, path: str) -> None:
    """Refuse a file or directory that others than its owner can change."""
    if status.st_uid != owner:
        text = f"{path} belongs to user {status.st_uid}, not to user {owner}"
        raise PermissionError(errno.EPERM, text)
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, f"others can write {path}: chmod go-w is needed")
