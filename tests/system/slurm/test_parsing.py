# SPDX-License-Identifier: Apache-2.0
"""What is read of what Slurm prints, and that any text is read or refused."""

import contextlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.doctor.slurm_conf import advise, read_config
from slurm_health.node.rules import drain_note
from slurm_health.records.errors import LocalizeError, SlurmHealthError
from slurm_health.records.nodeset import expand
from slurm_health.system.slurm.job_gres import NodeGres, gres_of, may_have_gpus, shares
from slurm_health.system.slurm.parsing import (
    Job,
    job_fields,
    job_of,
    node_of,
    parse_pairs,
    parse_topology,
    partition_of,
)
from tests.support.rows import rows
from tests.test_fuzz import ODD, SLURM, as_text, damaged, read


@rows
def test_leaves_are_what_nodes_hang_on(text: str, leaves: dict[str, str]) -> None:
    assert parse_topology(text) == {name: expand(nodes) for name, nodes in leaves.items()}


def test_a_node_list_that_cannot_be_read_is_named_with_its_line() -> None:
    with pytest.raises(LocalizeError, match="line 2"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[1-\n")


def test_a_node_on_two_leaves_is_refused() -> None:
    with pytest.raises(LocalizeError, match="node n1 hangs on b and on a"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n")


@given(st.text() | st.text(alphabet="SwitchName=odeLv01 []-,()\n#"))
def test_no_text_crashes_the_parser(text: str) -> None:
    with contextlib.suppress(LocalizeError):
        parse_topology(text)


# --- what a job has on its nodes, as Slurm 22.05.8, 24.11.5 and 26.05.5 print it ------------------


def shown(asked: str, *groups: str) -> str:
    """Return one job as `scontrol show job -d -o` shows it, on groups of nodes with their GRES."""
    nodes = " ".join(
        f"Nodes={each.split()[0]} CPU_IDs=0-1 Mem=2000 GRES={''.join(each.split()[1:])}"
        for each in groups
    )
    return (
        f"JobId=2 JobName=x UserId=alice(2001) JOB_GRES=gpu:8 {nodes} "
        f"MinCPUsNode=1 Command=/bin/true {asked} CpusPerTres=gres:gpu:1 Power=\n"
    )


@rows
def test_however_the_job_asked_its_steps_ask_for_all_that_nodes_have(
    asked: str, groups: list[str], steps: dict[str, tuple[str, ...]]
) -> None:
    gres = gres_of(shown(asked, *groups) if groups else "slurm_load_jobs error")
    nodes = ",".join(steps).split(",")
    assert {",".join(step.nodes): step.options for step in shares(nodes, gres)} == steps
    assert groups != ["n[1-2] "] or gres == {"n1": NodeGres(), "n2": NodeGres()}


@rows
def test_slurm_is_asked_of_jobs_with_gpus_only(environ: dict[str, str], asked: bool) -> None:
    assert may_have_gpus(environ) is asked


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
