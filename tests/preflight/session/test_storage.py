# SPDX-License-Identifier: Apache-2.0
"""Whose fault slow or failing storage is, judged from what each node did and read of its peers."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from slurm_health.preflight.session.storage import judge
from slurm_health.records.probe_catalog import HUNG, LATE, OK, UNSEEN
from slurm_health.records.records import StorageRead, StorageTested
from slurm_health.records.verdict import Level, NodeVerdict, StorageBlame, StorageVerdict
from tests.support.rows import rows

Tests = dict[str, StorageTested]
Change = dict[str, Any]  # the kind with its nodes, then how


def ring(nodes: int, **fields: object) -> Tests:
    """Return well tests of so many nodes, in which each reads its two neighbours' files."""
    names = [f"n{number}" for number in range(nodes)]
    tests = {}
    for place, name in enumerate(names):
        following, before = names[(place + 1) % nodes], names[place - 1]
        reads = {
            peer: StorageRead(status=OK, ms=20.0 if peer == following else 0.0)
            for peer in (following, before)
            if peer != name
        }
        well = StorageTested(
            node=name,
            path="/shared",
            status=OK,
            small_ms=5.0,
            large_ms=80.0,
            reads=reads,
            filesystem="nfs4",
            server="srv:/shared",
        )
        tests[name] = msgspec.structs.replace(well, **fields)
    return tests


def fail(
    tests: Tests,
    *nodes: str,
    own: str = OK,
    reads: str = OK,
    seen: str | None = None,
    **fields: object,
) -> None:
    """Let nodes fail with their own files, in reading others', and in being read by others."""
    for node in nodes:
        test = tests[node]
        read = {peer: StorageRead(status=reads) for peer in test.reads}
        kept = read if reads != OK else test.reads
        tests[node] = msgspec.structs.replace(test, status=own, reads=kept, **fields)
    unread = seen or (LATE if own != OK else OK)
    for name, test in tests.items():
        if unread != OK and name not in nodes:
            hidden = {n: StorageRead(status=unread) for n in test.reads if n in nodes}
            tests[name] = msgspec.structs.replace(test, reads={**test.reads, **hidden})


def slow(tests: Tests, *nodes: str, own_ms: float = 3000.0, read_ms: float = 3000.0) -> None:
    """Let nodes write and read slowly."""
    for node in nodes:
        reads = {
            peer: StorageRead(status=OK, ms=read_ms if read.ms else 0.0)
            for peer, read in tests[node].reads.items()
        }
        tests[node] = msgspec.structs.replace(tests[node], large_ms=own_ms, reads=reads)


def unmounted(tests: Tests, node: str) -> None:
    """Let a node have an empty directory of its own where others have the mount."""
    fail(tests, node, reads=UNSEEN, seen=UNSEEN, server="", filesystem="ext4")


KINDS: dict[str, Callable[..., None]] = {"fail": fail, "slow": slow, "unmounted": unmounted}


def apply(tests: Tests, change: Change) -> None:
    """Let happen what a row names, to the nodes that it names."""
    (kind, nodes), *fields = change.items()
    KINDS[kind](tests, *(tests if nodes == ["all"] else nodes), **dict(fields))


def judged(
    nodes: int, *changes: Change, **fields: object
) -> tuple[dict[str, Level], dict[StorageBlame, int]]:
    """Return who is accused of what, and whose matter it is on how many nodes."""
    tests = ring(nodes, **fields)
    for change in changes:
        apply(tests, change)
    verdicts = list(judge(tests.values()))
    accused = [verdict for verdict in verdicts if isinstance(verdict, NodeVerdict)]
    storage = [verdict for verdict in verdicts if isinstance(verdict, StorageVerdict)]
    assert all(verdict.component == "storage" and verdict.evidence for verdict in accused)
    assert all("/shared" in reason for reason in [v.reason for v in accused])
    assert all("/shared" in reason for reason in [v.reason for v in storage])
    return (
        {verdict.node: verdict.level for verdict in accused},
        {verdict.blame: len(verdict.nodes) for verdict in storage},
    )


SERVER, USER, UNDECIDED = StorageBlame.SERVER, StorageBlame.USER, StorageBlame.UNDECIDED


@pytest.mark.parametrize("nodes", [3, 4, 8, 64])
@rows
def test_one_client_is_at_fault_whose_peers_wrote_and_read_there(
    nodes: int, changes: list[Change], level: Level
) -> None:
    assert judged(nodes, *changes) == ({"n1": level}, {})


@rows
def test_no_node_is_accused_of_what_is_not_proven_to_be_its_own(
    nodes: int, changes: list[Change], blame: Mapping[StorageBlame, int]
) -> None:
    assert judged(nodes, *changes) == ({}, blame)


def test_directories_that_each_node_has_for_itself_are_judged_by_their_own_files() -> None:
    local = {"server": "", "filesystem": "xfs", "reads": {}, "large_ms": 0.0}
    assert judged(4, **local) == ({}, {})
    assert judged(4, {"fail": ["n2"], "own": "EROFS"}, **local) == ({"n2": Level.FAULTY}, {})
    assert judged(4, {"fail": ["n2"], "own": "ENOSPC"}, **local) == ({}, {USER: 1})
    assert judged(4, {"fail": ["n2"], "small_ms": 2000.0}, **local) == ({"n2": Level.SLOW}, {})
    assert judged(2, {"fail": ["n1"], "own": "EIO"}, **local) == ({}, {UNDECIDED: 1})


def test_a_random_part_of_the_nodes_is_never_accused_together() -> None:
    chance = random.Random(7)
    for _ in range(300):
        nodes = chance.randint(4, 40)
        bad = chance.sample([*ring(nodes)], chance.randint(max(2, nodes // 4 + 1), nodes))
        trouble = chance.choice([HUNG, "EIO", "ESTALE", UNSEEN])
        accused, blame = judged(nodes, {"fail": bad, "own": trouble, "reads": trouble})
        assert (accused, blame) == ({}, {SERVER: len(bad)})


def test_a_disk_of_the_server_that_fails_accuses_nobody_wherever_its_files_are() -> None:
    chance = random.Random(11)
    for _ in range(300):
        nodes = chance.randint(3, 40)
        tests = ring(nodes)
        lost = {name for name in tests if chance.random() < 0.25}
        for name in lost:
            fail(tests, name, own=HUNG, seen=HUNG)
        for name, test in tests.items():  # what others lost hangs for all who read it
            reads = {
                peer: StorageRead(status=HUNG if peer in lost else OK, ms=20.0)
                for peer in test.reads
            }
            tests[name] = msgspec.structs.replace(test, reads=reads)
        assert not any(isinstance(verdict, NodeVerdict) for verdict in judge(tests.values()))


def test_each_path_has_a_verdict_of_its_own_and_says_what_it_is_on() -> None:
    shared, home = ring(4), ring(4, path="/home/alice", server="srv:/home")
    fail(shared, "n2", own=HUNG, reads=HUNG, at="sync")
    fail(home, *home, own="EDQUOT", free_bytes=0, total_bytes=10**10)
    node, storage = judge([*shared.values(), *home.values()])
    assert isinstance(node, NodeVerdict)
    assert isinstance(storage, StorageVerdict)
    assert node.reason == (
        "storage /shared (nfs4, srv:/shared) did not answer within 6 s at sync, and is well on"
        " n[0-1,3]"
    )
    assert storage.reason == (
        "storage /home/alice (nfs4, srv:/home) is over its quota (EDQUOT), 0.00 of 10.00 GB free"
        " on all 4 nodes: a matter of the user's files, not of the nodes"
    )
