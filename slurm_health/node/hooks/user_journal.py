# SPDX-License-Identifier: Apache-2.0
"""Read what the ended job's journal says about this node: as the job's user, in a child.

The child gives up root before it opens anything, so whatever it is led to, it can open only what
the user can; and below the journal's root it opens what `private_files` allows.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.hooks.hook import number
from slurm_health.node.site import Site
from slurm_health.records.decoding import from_msgpack
from slurm_health.system import private_files
from slurm_health.system.killable import (
    Answered,
    Broke,
    Hung,
    Stuck,
    Work,
    WorkResult,
    limit_memory,
    recall_stuck,
    run_guarded,
)

if TYPE_CHECKING:  # most jobs accuse nobody, and then nobody needs to know what that looks like
    from slurm_health.node.rules.accusations import Accusation

_DEFAULT_ROOT = "~/.slurm-health/journal"
_MASTER = "master.jsonl"
# Of a job's runs the last ones: no attempt has as many.
_MOST_RUNS = 50
_MOST_BYTES = 16 << 20
_GUARDED = "journal of user "
# So many users whose readers the kernel holds: the filesystem may be gone, and is asked itself.
_MOST_HELD = 3
_SHARED = "root of all journals"
_MEMORY_BYTES = 2 << 30
# Slurm gives job ids out again when it has lost its state. The clocks of nodes differ by less.
_OF_ANOTHER_JOB_S = 24 * 3600


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The job an epilog is called for.

    `attempt` is None, and `start_s` 0, where this Slurm does not tell it.
    """

    job: int
    uid: int
    gid: int
    cluster: str
    attempt: int | None
    start_s: int = 0


class Unreadable(Exception):
    """The journal could not be read, so nobody is accused. Its text says why."""


def job_of(environ: Mapping[str, str]) -> JobEnded | None:
    """Return the job an epilog is called for; None where it is not called for one."""
    job = number(environ, "SLURM_JOB_ID", 0)
    uid = number(environ, "SLURM_JOB_UID", -1)
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    if job <= 0 or uid < 0 or not cluster or "/" in cluster or cluster.startswith("."):
        return None
    attempts = (
        number(environ, name, -1) for name in ("SLURM_JOB_RESTART_COUNT", "SLURM_RESTART_COUNT")
    )
    return JobEnded(
        job=job,
        uid=uid,
        gid=number(environ, "SLURM_JOB_GID", -1),
        cluster=cluster,
        attempt=next((each for each in attempts if each >= 0), None),
        start_s=number(environ, "SLURM_JOB_START_TIME", 0),
    )


def accusations(site: Site, ended: JobEnded, node: str) -> list[Accusation]:
    """Return what the job's journal says against this node.

    Raises:
        Unreadable: it cannot be read, or is not what a journal is. Nobody is accused.
    """

    def work() -> bytes:
        home = become(ended)
        root = Path(site.journal or _DEFAULT_ROOT)
        if root.parts[:1] == ("~",):
            root = home.joinpath(*root.parts[1:])
        found = list(_read(root, ended, node, _MOST_BYTES))
        return msgspec.msgpack.encode(found) if found else b""

    match _guarded(site, ended, work):
        case Answered(data=data):
            return _checked(data, ended, node) if data else []
        case Broke(reason=reason):
            raise Unreadable(reason)
        case Hung(limit_s=limit_s):
            raise Unreadable(f"the journal could not be read within {limit_s:g} s")
        case Stuck(pid=pid):
            raise Unreadable(f"process {pid} of an earlier epilog waits for it in the kernel")


def _guarded(site: Site, ended: JobEnded, work: Work) -> WorkResult | Stuck:
    """Read one user's journal; one that holds its reader for ever keeps out that user's alone.

    A user can mount a filesystem that never answers, over what other users' jobs will have too.
    Where several readers are held, the one that all share is asked: below its root stands nothing
    of a user's.
    """

    def shared() -> bytes:
        become(ended)
        with os.scandir(Path(site.journal, ended.cluster)) as entries:
            next(entries, None)
        return b""

    held = [each for each in recall_stuck(site.state) if each.startswith((_GUARDED, _SHARED))]
    if len(held) >= _MOST_HELD and site.journal.startswith("/"):
        root = run_guarded(site.state, _SHARED, shared, site.timing.journal_s)
        if isinstance(root, Hung | Stuck):
            return root
    return run_guarded(site.state, f"{_GUARDED}{ended.uid}", work, site.timing.journal_s)


def _checked(data: bytes, ended: JobEnded, node: str) -> list[Accusation]:
    """Take nothing from the user's child that is not an accusation of this node by this job."""
    from slurm_health.node.rules.accusations import Accusation

    try:
        found = from_msgpack(data, list[Accusation])
    except msgspec.DecodeError as err:
        raise Unreadable(f"its reader gave an unreadable answer: {err}") from err
    return [each for each in found if each.node == node and each.job == ended.job]


def become(ended: JobEnded) -> Path:
    """Give up root for good and return the user's home.

    Raises:
        Unreadable: that is not possible.
    """
    import pwd

    try:
        user = pwd.getpwuid(ended.uid)
    except KeyError as err:
        raise Unreadable(f"there is no user {ended.uid} here") from err
    gid = ended.gid if ended.gid >= 0 else user.pw_gid
    if os.geteuid() == 0:
        os.initgroups(user.pw_name, gid)
        os.setresgid(gid, gid, gid)
        os.setresuid(ended.uid, ended.uid, ended.uid)
    if os.getresuid() != (ended.uid,) * 3:
        raise Unreadable(f"cannot become user {ended.uid}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    limit_memory(_MEMORY_BYTES)
    return Path(user.pw_dir)


def _read(root: Path, ended: JobEnded, node: str, max_bytes: int) -> Iterator[Accusation]:
    place = root / ended.cluster / str(ended.job)
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return  # a job that was never checked, as most are
    except OSError as err:
        raise Unreadable(f"{place}: {err.strerror or err}") from err
    from slurm_health.node.rules.accusations import from_journal
    from slurm_health.system.journal import name_of

    directory = name_of(root, ended.cluster, str(ended.job), ended.uid, quick=True)

    for name in _runs(root, ended, directory):
        data = _read_run(root, ended, (directory, name), max_bytes)
        found = from_journal(data, node=node, job=ended.job) if data else None
        if found is not None:
            yield found


def _runs(root: Path, ended: JobEnded, directory: str) -> list[str]:
    """Return the names of the runs of the attempt that ended, of all where it is not known."""
    from slurm_health.system.journal import attempt_and_check, label_of, runs_of

    try:
        listed = runs_of(root, ended.cluster, directory, owner=ended.uid)
    except OSError as err:
        raise Unreadable(err.strerror or str(err)) from err
    runs = {run for path in listed if (run := attempt_and_check(path.name))}
    if ended.attempt is not None:
        # Slurm counts a requeue before the epilogs of the attempt that it ended. And a network
        # filesystem may show an old listing, but not an old file.
        attempts = {ended.attempt, max(0, ended.attempt - 1)}
        runs = {run for run in runs if run[0] in attempts} | {(each, 1) for each in attempts}
    return [label_of(*run) for run in sorted(runs)[-_MOST_RUNS:]]


def _read_run(root: Path, ended: JobEnded, run_of_job: tuple[str, str], max_bytes: int) -> bytes:
    levels = (ended.cluster, *run_of_job)
    try:
        with private_files.directory(root, *levels, owner=ended.uid) as run:
            written_s = os.stat(_MASTER, dir_fd=run, follow_symlinks=False).st_mtime
            if written_s < ended.start_s - _OF_ANOTHER_JOB_S:
                return b""  # the journal of an older job with this id
            return private_files.read(run, _MASTER, most_bytes=max_bytes)
    except FileNotFoundError:
        return b""
    except OSError as err:
        raise Unreadable(f"{run_of_job[1]}: {err.strerror or err}") from err
