# SPDX-License-Identifier: Apache-2.0
"""The journal: a directory of append-only files, one writer each, on a filesystem all nodes share.

    <root>/<cluster>/<job>/<attempt>/master.jsonl, <node>.jsonl, supervisor.jsonl, requeue.jsonl,
                                     post-mortem.jsonl, restart.jsonl, monitor.jsonl

A writer opens, appends whole lines and closes; a reader opens anew each time, because NFS makes
data visible on close and open. Readers open the names they expect and never rely on a directory
listing, which NFS caches. No lock guards the truth: no file has two writers. Only their user can
change runs, wherever the root lies: `private_files` opens them.

    files         a run's files: one per writer; reading new entries
    directories   the directory of a run, and the runs of a job
    statuses      owners of the directories of jobs, whatever is mounted over them
"""

from slurm_health.system.journal.directories import (
    JOURNAL_NAME,
    attempt_and_check,
    clusters_in,
    directory_of_check,
    directory_of_failed_check,
    directory_of_start,
    job_directory,
    job_of,
    label_of,
    link_array_task,
    linked_to,
    name_of,
    owners_of,
    runs_of,
)
from slurm_health.system.journal.files import (
    ANSWER_LIMIT_S,
    AT_A_TIME,
    MASTER,
    MONITOR,
    POST_MORTEM,
    REQUEUE,
    RESTART,
    SUPERVISOR,
    Reader,
    Writer,
    await_answer,
    create,
    lock,
    opened,
    path_of,
    read_all,
    read_new_of,
    unusable,
)
from slurm_health.system.journal.statuses import PathStatus, statuses

__all__ = [
    "ANSWER_LIMIT_S",
    "AT_A_TIME",
    "JOURNAL_NAME",
    "MASTER",
    "MONITOR",
    "POST_MORTEM",
    "REQUEUE",
    "RESTART",
    "SUPERVISOR",
    "PathStatus",
    "Reader",
    "Writer",
    "attempt_and_check",
    "await_answer",
    "clusters_in",
    "create",
    "directory_of_check",
    "directory_of_failed_check",
    "directory_of_start",
    "job_directory",
    "job_of",
    "label_of",
    "link_array_task",
    "linked_to",
    "lock",
    "name_of",
    "opened",
    "owners_of",
    "path_of",
    "read_all",
    "read_new_of",
    "runs_of",
    "statuses",
    "unusable",
]
