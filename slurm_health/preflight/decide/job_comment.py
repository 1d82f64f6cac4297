# SPDX-License-Identifier: Apache-2.0
"""The comment on a job that is held: why, and what to do. Pure.

Whoever put it there is dead by the time it is read, so it goes on the job before the requeue. A
comment of the job's own stands at its end, and comes back when ours has served.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.nodeset import fold
from slurm_health.records.text import REASON_PREFIX, cut, plain

_OWN = " | own comment: "
_LENGTH = 300  # of a reason within a comment


def own_comment(comment: str) -> str:
    """Return the job's own comment, whether or not a note of ours stands before it."""
    return comment.partition(_OWN)[2] if comment.startswith(REASON_PREFIX) else comment


def leaving(job: str, nodes: Sequence[str], excluded: Sequence[str], reason: str) -> str:
    """Return the note on a job that is being moved off some nodes, true whatever comes of it."""
    how = release_without(job, [*excluded, *nodes])
    return (
        f"{REASON_PREFIX} requeued without {fold(nodes)} ({_cut(reason)})."
        f" If the job stays held, release it by hand: {how}"
    )


def waiting(job: str, nodes: Sequence[str], excluded: Sequence[str], reason: str) -> str:
    """Return the note on a job that waits for a person."""
    how = release_without(job, [*excluded, *nodes])
    return (
        f"{REASON_PREFIX} held ({_cut(reason)}). To run it without {fold(nodes)}: {how}."
        f" To run it anyway: scontrol release {job}"
    )


def with_own(note: str, own: str) -> str:
    """Return a note with the job's own comment kept at its end."""
    return f"{note}{_OWN}{own}" if own else note


def release_without(job: str, excluded: Sequence[str]) -> str:
    """Return the commands that release a job without some nodes.

    The keys are in lower case, which scontrol reads as well: capital ones would be taken for
    fields of the job by whoever reads `scontrol show job`.
    """
    changes = f"excnodelist={fold(excluded)} starttime=now"
    return f"scontrol update jobid={job} {changes}; scontrol release {job}"


def _cut(reason: str) -> str:
    return cut(plain(reason).replace(_OWN, " ").replace("=", " "), _LENGTH)
