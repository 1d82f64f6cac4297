# SPDX-License-Identifier: Apache-2.0
"""The ends of the job's output files, read for what they say of its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_health.training.diagnosis.collected import TrainingLog
from slurm_health.training.diagnosis.training_log import read_log
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected
from slurm_health.training.monitor.output_files import patterns_in, srun_files

# Of the job's own output: what a thousand ranks write when their connections break is 4 MB.
JOB_TAIL_BYTES = 16 << 20
# Of each further file, and how many of them: those that were written last.
TASK_TAIL_BYTES = 256 << 10
MOST_TASK_FILES = 64
_SLACK_S = 120.0  # clocks of a file server and a node differ by less, or the files are left out


class JobOutput:
    """What the job's standard output and error say, and the files that its sruns wrote."""

    name = "job-output"
    data = TrainingLog

    def is_enabled(self, job: EndedJob) -> Enabled:
        """There must be a file."""
        if job.outputs or any(patterns_in(job.script_text)):
            return Enabled()
        return Enabled("standard output and error are no files")

    def collect_data(self, job: EndedJob) -> TrainingLog:
        """Read the ends of the files, and what they say.

        Raises:
            NothingCollected: none of them can be read.
        """
        texts = []
        problems = []
        cut = False
        for path, most_bytes in _files(job):
            try:
                text, was_cut = tail(path, most_bytes, begin=job.output_from.get(path, 0))
            except OSError as err:
                problems.append(f"{path}: {err.strerror or err}")
                continue
            texts.append((str(path), text))
            cut |= was_cut
        if not texts:
            raise NothingCollected("; ".join(problems) or "there is no output file")
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job.ended_s - job.duration_s))
        shared = sum(name in set(map(str, job.outputs)) for name, _ in texts)
        return read_log(texts, cut=cut, began=began, shared=shared)


def tail(path: Path, most_bytes: int, *, begin: int = 0) -> tuple[str, bool]:
    """Return the end of a file, from `begin` on, as text, and whether that is not all of it.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if not path.is_file():
            raise OSError(f"{path} is no plain file")
        begin = begin if begin <= size else 0  # it was replaced or cut since
        start = max(begin, size - most_bytes)
        data = b""
        while len(data) < most_bytes:
            chunk = os.pread(file, most_bytes - len(data), start + len(data))
            if not chunk:
                break
            data += chunk
    finally:
        os.close(file)
    return data.decode(errors="replace"), start > begin


def _files(job: EndedJob) -> Iterator[tuple[Path, int]]:
    for path in dict.fromkeys(job.outputs):
        yield path, JOB_TAIL_BYTES
    since_s = job.ended_s - job.duration_s - _SLACK_S
    found = srun_files(job.script_text, job.directory, job.environ, since_s=since_s)
    newest = [path for path in found if path not in job.outputs]
    yield from ((path, TASK_TAIL_BYTES) for path in sorted(newest[:MOST_TASK_FILES]))
