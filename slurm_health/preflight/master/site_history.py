# SPDX-License-Identifier: Apache-2.0
"""What the site's history says of a check's nodes: one small file, which its cron writes."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from slurm_health.records.standings import Known, Level, known_of, prior_of, read
from slurm_health.system.site_file import others_can_write

log = logging.getLogger(__name__)

# Every node of the largest cluster, with a hundred bytes each, is a tenth of this.
_MOST_BYTES = 1 << 26
_NAMED = 3  # of the lemons among a job's nodes


def prior(
    path: Path | None, cluster: str, nodes: Sequence[str], *, now_s: float
) -> dict[str, float]:
    """Return how likely nodes are to be bad by the site's history.

    What cannot be used is said and says nothing of any node.
    """
    if path is None:
        return {}
    try:
        known = known_of(read(_content(path), now_s=now_s), cluster, nodes)
    except (OSError, ValueError) as err:
        why = (err.strerror or err) if isinstance(err, OSError) else err
        log.warning("the history of nodes is left out of account: %s: %s", path, why)
        return {}
    _tell(known)
    return prior_of(known)


def _tell(known: dict[str, Known]) -> None:
    lemons = [(node, each) for node, each in known.items() if each.level is Level.LEMON]
    for node, each in sorted(lemons, key=lambda lemon: -lemon[1].score)[:_NAMED]:
        told = "%s has spoiled %d of %d jobs: it is looked at closely"
        log.info(told, node, each.spoiled, each.jobs)


def _content(path: Path) -> bytes:
    """Return what the file holds.

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
