# SPDX-License-Identifier: Apache-2.0
"""What is mounted where, as the kernel tells it, and which of it users mounted over journals."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNTS = Path("/proc/self/mounts")
_FEWEST_FIELDS = 4  # device, point, type, options
_OCTAL = re.compile(r"\\([0-7]{3})")  # proc(5): of blanks, line ends and backslashes
_OF_A_USER = re.compile(r"(?:^|,)user_id=[1-9]")


class Mount(NamedTuple):
    """What is mounted on a point."""

    kind: str
    options: str


def mounts_in(text: str) -> dict[str, Mount]:
    """Return what is mounted, by point; the last mount on a point is the one in use.

    `text` is that of /proc/self/mounts.
    """
    mounts = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= _FEWEST_FIELDS:
            point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), words[1])
            mounts[point] = Mount(kind=words[2], options=words[3])
    return mounts


def mount_of(mounts: Mapping[str, Mount], path: str) -> Mount:
    """Return the mount that a path lies on; type and options are empty where there is none."""
    above = (path, *map(str, PurePosixPath(path).parents))
    return next((mounts[each] for each in above if each in mounts), Mount("", ""))


def mounted(mounts: Path = MOUNTS) -> dict[str, Mount]:
    """Return what is mounted here, nothing where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return mounts_in(mounts.read_text(errors="surrogateescape"))
    return {}


def mounted_by_users(root: Path, mounts: Path = MOUNTS) -> frozenset[str]:
    """Return the clusters, `lab`, and the jobs, `lab/12`, with a user's filesystem in them.

    With FUSE any user may mount something on a directory of their own. Whoever asks such a
    filesystem is refused, or waits for its owner's answer.
    """
    points = [
        point
        for point, (kind, options) in mounted(mounts).items()
        if kind.startswith("fuse") and _OF_A_USER.search(options)
    ]
    if not points:
        return frozenset()
    above = os.path.realpath(root) + "/"
    below = [each.removeprefix(above) for each in points if each.startswith(above)]
    return frozenset("/".join(each.split("/")[:2]) for each in below)
