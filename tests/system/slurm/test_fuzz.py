# SPDX-License-Identifier: Apache-2.0
"""What Slurm says, its notes and a job's environment are read, or refused with an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from hypothesis import given

from slurm_health.node.doctor.slurm_conf import advise, read_config
from slurm_health.node.rules import drain_note
from slurm_health.records.errors import SlurmHealthError
from slurm_health.system.slurm.parsing import (
    Job,
    job_fields,
    job_of,
    node_of,
    parse_pairs,
    partition_of,
)
from tests.test_fuzz import ODD, SLURM, as_text, damaged, read

# --- what Slurm says ---------------------------------------------------------------------------

SHOWN = read(SLURM, "job-*.txt") + read(SLURM, "node*.txt") + read(SLURM, "config.txt")
NAMES = [b" JobId=4 JobName=x", b" Reason=shealth:x y [root@2026-01-01T00:00:00]", b" State=",
         b" NodeList=n[1-", b" Restarts=", b" TotalNodes=", b"MaxNodes=", b" Partitions=a,,b",
         b"NodeName=n1 ", b" Priority=0", b"JobState=PENDING+X", b"PartitionName=p "]  # fmt: skip


def properties(value: object) -> Iterator[object]:
    """Ask for all that a value derives from what was read."""
    for name, attribute in vars(type(value)).items():
        if isinstance(attribute, property):
            with suppress(SlurmHealthError):
                yield getattr(value, name)


@given(as_text(damaged(SHOWN, ODD + NAMES)))
def test_any_answer_of_slurm_is_read_or_refused(text: str) -> None:
    job = job_of(4, job_fields(4, text))
    assert isinstance(job, Job)
    found: list[object] = [job, partition_of(parse_pairs(text))]
    found += [node for line in text.splitlines() if (node := node_of(line))]
    for each in found:
        list(properties(each))
    advise(read_config(text), None)


NOTES = [b"shealth:fs /scratch is full check=fs-scratch job=7 t=1763661234 [root@2026-11-20T17:49]",
         *(note.partition(b"Reason=")[2] for note in read(SLURM, "node-drained.txt"))]  # fmt: skip


@given(as_text(damaged(NOTES, ODD + NAMES)))
def test_no_note_is_taken_for_ours_that_does_not_begin_like_ours(note: str) -> None:
    for line in f"NodeName=n1 State=IDLE+DRAIN Reason={note}".splitlines():
        node = node_of(line)
        if node is not None and drain_note.parse(node.reason) is not None:
            assert drain_note.is_ours(node.reason)
        if node is not None and drain_note.is_ours(node.reason):
            assert node.reason.startswith("shealth:")
            assert "\x1b" not in drain_note.bare_text(node.reason)
