# SPDX-License-Identifier: Apache-2.0
"""Read what the ended job's journal says about this node: as the job's user, in a child.

The child gives up root before it opens anything, so it can open only what the user can, whatever
the journal leads it to. Below the journal's root it opens what `private_files` allows.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.hook import number
from slurm_health.node.site import Site
from slurm_health.records.decoding import from_msgpack
from slurm_health.system.killable import (
    Answered,
    Broke,
    Hung,
    Stuck,
    become,
    limit_memory,
    run_guarded,
)

if TYPE_CHECKING:  # most jobs accuse no node, and their epilogs load none of it
    from slurm_health.node.rules.accusations import Accusation

_DEFAULT_ROOT = "~/.slurm-health/journal"
# No attempt has as many runs; of more, the last ones count.
_MOST_RUNS = 50
_MOST_BYTES = 16 << 20
_GUARDED = "journal of user "
_MEMORY_BYTES = 2 << 30
# Slurm reuses job ids after it has lost its state. The clocks of nodes differ by less.
_OF_ANOTHER_JOB_S = 24 * 3600


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The job an epilog is called for; `attempt` is None and `start_s` 0 if Slurm sets neither."""

    job: int
    uid: int
    gid: int
    cluster: str
    attempt: int | None
    start_s: int = 0


class Unreadable(Exception):
    """The journal cannot be read, so no node is accused; the text says why."""


def job_of(environ: Mapping[str, str]) -> JobEnded | None:
    """Return the job an epilog is called for; None without one."""
    job = number(environ, "SLURM_JOB_ID", 0)
    uid = number(environ, "SLURM_JOB_UID", -1)
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    if job <= 0 or uid < 0 or not cluster or "/" in cluster or cluster.startswith("."):
        return None
    attempt = number(environ, "SLURM_JOB_RESTART_COUNT", number(environ, "SLURM_RESTART_COUNT", -1))
    return JobEnded(
        job=job,
        uid=uid,
        gid=number(environ, "SLURM_JOB_GID", -1),
        cluster=cluster,
        attempt=attempt if attempt >= 0 else None,
        start_s=number(environ, "SLURM_JOB_START_TIME", 0),
    )


def accusations(site: Site, ended: JobEnded, node: str) -> list[Accusation]:
    """Return what the job's journal says against this node.

    A user can mount a filesystem that never answers over their own journal, so a reader that the
    kernel holds keeps out that user's journals alone.

    Raises:
        Unreadable: it cannot be read, or is no journal.
    """

    def work() -> bytes:
        root = _be_user(site, ended)
        accused = list(_read(root, ended, node))
        return msgspec.msgpack.encode(accused) if accused else b""

    match run_guarded(site.state, f"{_GUARDED}{ended.uid}", work, site.timing.journal_s):
        case Answered(data=data):
            return decode_answer(data, ended, node) if data else []
        case Broke(reason=reason):
            raise Unreadable(reason)
        case Hung(limit_s=limit_s):
            raise Unreadable(f"the journal could not be read within {limit_s:g} s")
        case Stuck(pid=pid):
            raise Unreadable(f"process {pid} of an earlier epilog waits for it in the kernel")


def decode_answer(data: bytes, ended: JobEnded, node: str) -> list[Accusation]:
    """Return the accusations of this node by this job; the user's child may answer anything.

    Raises:
        Unreadable: the answer cannot be decoded.
    """
    from slurm_health.node.rules.accusations import Accusation

    try:
        accused = from_msgpack(data, list[Accusation])
    except msgspec.DecodeError as err:
        raise Unreadable(f"its reader gave an unreadable answer: {err}") from err
    return [a for a in accused if (a.node, a.job) == (node, ended.job)]


def append_held(site: Site, ended: JobEnded, node: str, text: str) -> None:
    """Append to the last check of a job that this node is not free after it; a failure loses it.

    The node's agent, which writes this file while the job runs, has ended.
    """
    import time

    from slurm_health.records.records import NodeHeld
    from slurm_health.system.journal import Writer, attempt_and_check, name_of, runs_of

    def work() -> bytes:
        root = _be_user(site, ended, most_bytes=_MOST_BYTES)
        job = name_of(root, ended.cluster, str(ended.job), ended.uid, quick=True)
        runs = runs_of(root, ended.cluster, job, owner=ended.uid)
        last = max(runs, key=lambda run: attempt_and_check(run.name) or (-1, 0), default=None)
        if last is not None:
            Writer(last, node, time.time).append(NodeHeld(node=node, text=text))
        return b""

    run_guarded(site.state, f"{_GUARDED}{ended.uid}", work, site.timing.journal_s)


def _be_user(site: Site, ended: JobEnded, *, most_bytes: int = 0) -> Path:
    """Become the job's user for good; return the root of their journals.

    No file grows beyond `most_bytes`.

    Raises:
        Unreadable: that is not possible.
    """
    import pwd

    try:
        user = pwd.getpwuid(ended.uid)
    except KeyError as err:
        raise Unreadable(f"there is no user {ended.uid} here") from err
    try:
        become(ended.uid, ended.gid if ended.gid >= 0 else None)
    except OSError as err:
        raise Unreadable(err.strerror or str(err)) from err
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    limit_memory(_MEMORY_BYTES)
    root = Path(site.journal or _DEFAULT_ROOT)
    return Path(user.pw_dir, *root.parts[1:]) if root.parts[0] == "~" else root


def _read(root: Path, ended: JobEnded, node: str) -> Iterator[Accusation]:
    """Yield the accusations of this node, run by run: of the attempt that ended, if it is known."""
    place = root / ended.cluster / str(ended.job)
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return  # a job that was never checked, as most are
    except OSError as err:
        raise Unreadable(f"{place}: {err.strerror or err}") from err
    from slurm_health.node.rules.accusations import from_journal
    from slurm_health.records.errors import JournalError, RecordTooNew
    from slurm_health.system.journal import (
        MASTER,
        Reader,
        attempt_and_check,
        job_directory,
        label_of,
        name_of,
        opened,
        runs_of,
    )

    directory = name_of(root, ended.cluster, str(ended.job), ended.uid, quick=True)
    try:
        listed = runs_of(root, ended.cluster, directory, owner=ended.uid)
    except OSError as err:
        raise Unreadable(err.strerror or str(err)) from err
    runs = {run for path in listed if (run := attempt_and_check(path.name))}
    if ended.attempt is not None:
        # Slurm counts a requeue before the epilogs of the attempt that it ended. And a network
        # filesystem may show an old listing, but not an old file.
        attempts = {ended.attempt, max(0, ended.attempt - 1)}
        runs = {run for run in runs if run[0] in attempts} | {(attempt, 1) for attempt in attempts}
    for label in (label_of(*run) for run in sorted(runs)[-_MOST_RUNS:]):
        reader = Reader(
            job_directory(root, ended.cluster, directory) / label, MASTER, of_anybody=True
        )
        name = reader.path.name
        try:
            with opened(reader.path.parent, ended.uid) as handle:
                file = os.stat(name, dir_fd=handle, follow_symlinks=False)
                if file.st_size > _MOST_BYTES:
                    raise Unreadable(f"{label}: {name} has {file.st_size} bytes")
                # The journal of an older job with this id says nothing.
                is_own = file.st_mtime >= ended.start_s - _OF_ANOTHER_JOB_S
                entries = reader.take(reader.fetch(handle)) if is_own else []
        except (FileNotFoundError, RecordTooNew):
            continue
        except (OSError, JournalError) as err:
            raise Unreadable(f"{label}: {getattr(err, 'strerror', None) or err}") from err
        accusation = from_journal([entry.record for entry in entries], node=node, job=ended.job)
        if accusation is not None:
            yield accusation
