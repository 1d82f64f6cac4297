# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: removes the caller's old journals, never that of a job that may be running.

A journal is there whole or not at all: it is renamed before it is removed, and what an interrupted
removal has left goes with the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_health.fleet.reading import jobs_below
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.system import journal, private_files
from slurm_health.system.proc import mounted_by_users
from slurm_health.system.slurm.client import Client

# Between its start and its end a job's script writes nothing to its journal. If Slurm cannot be
# asked whether a job runs, what was written within this time stays: Slurm jobs run for weeks.
_UNASKED_S = 60 * 86400.0
# A check without Slurm, `check --local`, writes at least this often.
_LOCAL_S = 3600.0
_BLOCK = 512  # st_blocks counts these, whatever the filesystem's are
_REMOVED = re.compile(r"\.removed-[0-9]{1,10}(-[0-9a-f]{8,16})?", re.ASCII)
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}", re.ASCII)


class JobJournal(NamedTuple):
    """A job's journal: what it takes on disk, and when it was last written."""

    cluster: str
    job: str
    size_bytes: int
    written_s: float


class RunningJobs(NamedTuple):
    """Slurm's answer: its cluster's name, and the jobs that have not ended; or why none."""

    cluster: str = ""
    jobs: frozenset[str] = frozenset()
    why_not: str = ""


def journals(root: Path) -> list[JobJournal]:
    """Return the caller's journals, the oldest first.

    Raises:
        JournalError: the root cannot be read.
    """
    own = []
    try:
        for cluster, entry in jobs_below(root, owner=os.geteuid()):
            with contextlib.suppress(OSError):  # it is being removed
                own.append(JobJournal(cluster, entry.name, *_measured(root / cluster / entry.name)))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    return sorted(own, key=lambda one: (one.written_s, one.cluster, one.job))


def running_jobs(environ: Mapping[str, str]) -> RunningJobs:
    """Ask Slurm, once, which jobs of the caller have not ended."""
    client = Client(environ, patience_s=0)
    try:
        jobs = client.unended(os.geteuid())
        return RunningJobs(client.cluster_name(), frozenset(map(str, jobs)))
    except SlurmError as err:
        return RunningJobs(why_not=str(err))


def choose(
    own: Sequence[JobJournal],
    running: RunningJobs,
    *,
    local: str,
    now_s: float,
    older_than_s: float,
) -> tuple[list[JobJournal], dict[str, list[JobJournal]]]:
    """Return which journals go, and by the reason those that are old enough and stay.

    Args:
        own: the caller's journals.
        running: the jobs that have not ended.
        local: the cluster of checks without Slurm.
        now_s: the time.
        older_than_s: the age beyond which a journal goes.
    """
    go: list[JobJournal] = []
    stay: dict[str, list[JobJournal]] = {}
    for one in own:
        age_s = now_s - one.written_s
        asked = bool(running.cluster) and one.cluster == running.cluster
        if age_s <= older_than_s:
            continue
        # A journal beside one whose name another user has taken is called `12.` and more.
        if asked and journal.job_of(one.job) in running.jobs:
            stay.setdefault("its job has not ended", []).append(one)
        elif one.cluster == local and age_s < _LOCAL_S:
            stay.setdefault("its check may still run", []).append(one)
        elif one.cluster != local and not asked and age_s < _UNASKED_S:
            why = "Slurm cannot be asked about its job, and it is younger than 60 days"
            stay.setdefault(why, []).append(one)
        else:
            go.append(one)
    return go, stay


def remove(root: Path, chosen: JobJournal) -> str:
    """Remove one journal of the caller; return why it stays, empty if it is gone.

    Raises:
        OSError: it cannot be removed, or not wholly.
    """
    try:
        with private_files.directory(root, chosen.cluster, owner=os.geteuid()) as handle:
            owner = os.stat(chosen.job, dir_fd=handle, follow_symlinks=False).st_uid
            if owner != os.geteuid():
                return f"it belongs to user {owner} now"
            if _measured(root / chosen.cluster / chosen.job)[1] != chosen.written_s:
                return "it was written just now"
            away = f".removed-{journal.job_of(chosen.job)}-{secrets.token_hex(8)}"
            os.rename(chosen.job, away, src_dir_fd=handle, dst_dir_fd=handle)
            shutil.rmtree(away, dir_fd=handle)
    except FileNotFoundError:
        pass  # another process has removed it
    return ""


def remove_leftovers(root: Path, removed: Collection[JobJournal]) -> None:
    """Remove what interrupted removals have left, and the names of removed tasks of arrays.

    What cannot be removed is left.
    """
    uid, mounted = os.geteuid(), mounted_by_users(root)
    with contextlib.suppress(OSError):
        for cluster in journal.clusters_in(root):
            jobs = {one.job for one in removed if one.cluster == cluster}
            with (
                contextlib.suppress(OSError),
                private_files.directory(root, cluster, owner=uid) as handle,
                private_files.entries(handle) as entries,
            ):
                for entry in list(entries):
                    rest, task = _REMOVED.fullmatch(entry.name), _TASK.fullmatch(entry.name)
                    if not (rest or task) or f"{cluster}/{entry.name}" in mounted:
                        continue
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_uid != uid:
                            continue
                        if rest:
                            shutil.rmtree(entry.name, dir_fd=handle)
                        elif os.readlink(entry.name, dir_fd=handle) in jobs:
                            os.unlink(entry.name, dir_fd=handle)


def _measured(directory: Path) -> tuple[int, float]:
    """Return what a directory takes on disk in bytes, and when it was last written.

    Raises:
        OSError: a part of it cannot be looked at.
    """
    size_bytes, written_s = 0, 0.0
    for place, _, files in os.walk(directory):
        for name in ("", *files):
            status = Path(place, name).lstat()
            size_bytes += status.st_blocks * _BLOCK
            written_s = max(written_s, status.st_mtime)
    return size_bytes, written_s


def size_text(count: int) -> str:
    """Return a size as a person says it: 34 MB."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"
