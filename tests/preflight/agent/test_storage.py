# SPDX-License-Identifier: Apache-2.0
"""The test of storage on one node: what it records, what it leaves behind, what it waits for."""

import time
from pathlib import Path

from slurm_health.preflight.agent.storage import StorageTest
from slurm_health.preflight.session.storage import judge
from slurm_health.records.probe_catalog import STORAGE_NODES, STORAGE_PATHS
from slurm_health.records.records import StorageTested

DEADLINE_S = 30.0


NODES = ("n1", "n2", "n3")


def all_of(*paths: Path) -> list[StorageTested]:
    """Return what three nodes record of these paths, and remove their files."""
    options = {STORAGE_NODES: "n[1-3]", STORAGE_PATHS: ",".join(map(str, paths))}
    tests = [StorageTest(node, options, "secret") for node in NODES]
    records: list[StorageTested] = []
    until_s = time.monotonic() + DEADLINE_S
    while len(records) < len(tests) * len(paths) and time.monotonic() < until_s:
        for test in tests:
            records += test.poll()
        time.sleep(0.01)
    for test in tests:
        test.end()
    return records


def test_a_local_directory_is_written_by_each_node_and_nothing_is_left(tmp_path: Path) -> None:
    records = all_of(tmp_path)
    assert {(record.node, record.status, record.at) for record in records} == {
        (node, "ok", "") for node in NODES
    }
    assert all(record.small_ms > 0 and record.total_bytes > 0 for record in records)
    assert not any(record.reads or record.server or record.large_bytes for record in records)
    assert list(tmp_path.iterdir()) == []
    assert list(judge(records)) == []


def test_a_path_that_is_not_there_is_recorded_beside_one_that_is(tmp_path: Path) -> None:
    records = all_of(tmp_path, tmp_path / "none")
    found = {(record.path, record.status, record.at) for record in records}
    assert found == {(str(tmp_path), "ok", ""), (str(tmp_path / "none"), "ENOENT", "stat")}
