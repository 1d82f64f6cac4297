# SPDX-License-Identifier: Apache-2.0
"""Files that one user keeps alone, wherever they lie.

Journals may lie where anybody can make directories, root reads what users wrote, and what stands in
a journal is run. So below its root no link is followed, nothing is opened but directories and plain
files, and nothing is used that another could have made or can change. What is refused is a
PermissionError that says why.
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
# O_PATH: a directory is found and not read, which costs a network filesystem nothing more.
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: whoever opens a FIFO would wait for its other end.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Without setuid, setgid and sticky, which a file that root writes must never have.
_PERMISSION = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Where a script may lie for as long as it runs; None is what TMPDIR says.
_TEMPORARY_PLACES = (None, "/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - a new directory in each


@contextlib.contextmanager
def directory(
    root: Path, shared: str, *own: str, owner: int | None, make: bool = False
) -> Iterator[int]:
    """Hold open the directory `root`/`shared`/`own`....

    Anybody may have a directory in `shared`, as in `/tmp`; those in `own` are one user's alone.

    Args:
        root: where links are still followed: the site or the user has chosen it.
        shared: the name of a directory there.
        own: the names of directories below it, outermost first.
        owner: whose they must be; None for whoever has the first one.
        make: make what is missing, for this user alone whatever the umask.

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
            found = os.fstat(handle)
            if depth == 0:
                _refuse_shared(found, keepers if owner is not None else {found.st_uid}, path)
                continue
            owner = found.st_uid if owner is None else owner
            _refuse(found, owner, path)
        yield handle


@contextlib.contextmanager
def opened(
    handle: int, name: str, flags: int = os.O_RDONLY, *, make: bool = False
) -> Iterator[int]:
    """Hold open a plain file in a directory that is held open, and of the same owner.

    Raises:
        PermissionError: it is refused.
        OSError: it cannot be opened, or with `make` not be made.
    """
    file = _made(handle, name, flags) if make else None
    file = os.open(name, flags | _FILE, dir_fd=handle) if file is None else file
    try:
        _accepted(file, handle, name)
        yield file
    finally:
        os.close(file)


def _accepted(file: int, handle: int, name: str, owner: int | None = None) -> os.stat_result:
    """Return what an open file is, which must be plain and of the same owner as its directory."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"{name} is not a plain file with one name")
    _refuse(found, os.fstat(handle).st_uid if owner is None else owner, name)
    return found


def _made(handle: int, name: str, flags: int) -> int | None:
    """Make and open a file that is not there, whatever the umask; None where it is."""
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=handle)
    except FileExistsError:
        return None


def read(
    handle: int,
    name: str,
    *,
    offset: int = 0,
    most_bytes: int = MOST_BYTES,
    owner: int | None = None,
) -> bytes:
    """Return what a file in a directory that is held open has from `offset` on.

    Whoever reads thousands says whose the directory is, which is asked for each file otherwise.

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
                break  # it was cut meanwhile
            data += piece
        return data
    finally:
        os.close(file)


@contextlib.contextmanager
def entries(handle: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    """List a directory that is held open, for as long as its entries are used.

    Raises:
        OSError: it cannot be read.
    """
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        with os.scandir(listing) as found:
            yield found
    finally:
        os.close(listing)


def directories_in(handle: int) -> list[str]:
    """Return the names of directories, not links, in a directory that is held open; not too many.

    Raises:
        OSError: it cannot be read.
    """
    with entries(handle) as found:
        some = itertools.islice(found, _MOST_NAMES)
        return [entry.name for entry in some if entry.is_dir(follow_symlinks=False)]


@contextlib.contextmanager
def temporary(name: str, data: bytes, *, mode: int = 0o600) -> Iterator[Path]:
    """Provide a file with this name and content, in a directory of its own where there is room.

    Raises:
        OSError: nowhere is room for it.
    """
    with contextlib.ExitStack() as stack:
        yield _laid_down(stack, name, data, mode)


def _laid_down(stack: contextlib.ExitStack, name: str, data: bytes, mode: int) -> Path:
    import tempfile  # not free, and the hooks only read

    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
            return path
    raise failure


def publish(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file so that a reader sees the old one or the new one, whole.

    Others may be able to write in its directory, as the account of an exporter in that of its
    metrics: the new file has a name that nobody foresees, is made where nothing was, and has its
    mode before it has its name. A link that stands at `path` is replaced, and never followed; the
    mode of what stands there is not taken over.

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


def is_own_directory(found: os.stat_result, owner: int) -> bool:
    """Tell whether this is a directory that is its owner's alone to change."""
    own = found.st_uid == owner and not found.st_mode & _OTHERS_WRITE
    return own and stat.S_ISDIR(found.st_mode)


def _below(handle: int, name: str, path: str) -> int:
    """Open a directory that is no link; `path` is what it is called in a refusal."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
    except NotADirectoryError as err:
        owner = os.stat(name, dir_fd=handle, follow_symlinks=False).st_uid
        text = f"{path} is a link or a file, and belongs to user {owner}"
        raise PermissionError(errno.EPERM, text) from err


def _refuse_shared(found: os.stat_result, keepers: set[int | None], path: str) -> None:
    """Refuse a directory whose owner, or in which anybody, may move what others have in it."""
    if found.st_uid not in keepers:
        raise PermissionError(errno.EPERM, f"{path} belongs to user {found.st_uid}")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, f"others can write {path}: chmod +t or go-w is needed")


def _refuse(found: os.stat_result, owner: int, path: str) -> None:
    """Refuse what is not its owner's alone to change."""
    if found.st_uid != owner:
        text = f"{path} belongs to user {found.st_uid}, not to user {owner}"
        raise PermissionError(errno.EPERM, text)
    if found.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, f"others can write {path}: chmod go-w is needed")
