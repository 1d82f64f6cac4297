# SPDX-License-Identifier: Apache-2.0
"""A value that many change at once loses no change, whatever is stale, damaged or killed."""

import os
from pathlib import Path

import pytest

from slurm_health.node.store import SharedStore, StoreDamaged, StoreUnusable


def shared(directory: Path) -> SharedStore[list[int]]:
    return SharedStore(directory, "ledger", list[int])


def add(store: SharedStore[list[int]], number: int) -> None:
    store.update(lambda before: ([*(before or []), number], None), lock_limit_s=30)


def test_processes_that_change_it_at_once_lose_no_change(tmp_path: Path) -> None:
    pids = []
    for process in range(4):
        pid = os.fork()
        if pid == 0:
            for number in range(50):
                add(shared(tmp_path), 50 * process + number)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    assert sorted(shared(tmp_path).load() or []) == list(range(200))
    assert len(list(tmp_path.glob("ledger.*"))) == 3


def test_a_change_of_an_old_value_is_made_again_on_the_new_one(tmp_path: Path) -> None:
    """As when a cache served the old one, and the lock of a filesystem locks nothing."""
    store, other = shared(tmp_path), shared(tmp_path)
    add(store, 1)
    values: list[list[int]] = []

    def change(before: list[int] | None) -> tuple[list[int], str]:
        values.append(before or [])
        if len(values) == 1:
            (tmp_path / "ledger.2").write_text("[1,2]")  # another node, in between
        return [*(before or []), 3], "done"

    assert other.update(change, lock_limit_s=0.1) == "done"
    assert values == [[1], [1, 2]]
    assert store.load() == [1, 2, 3]


def test_a_damaged_value_is_an_error_until_it_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "ledger.7").write_text("[1, 2")
    with pytest.raises(StoreDamaged, match=r"ledger\.7 is damaged"):
        shared(tmp_path).load()
    with pytest.raises(StoreDamaged):
        add(shared(tmp_path), 1)
    shared(tmp_path).update(lambda before: ([], before), lock_limit_s=1, anew=True)
    assert shared(tmp_path).load() == []


def test_what_a_process_that_was_killed_has_left_is_no_value(tmp_path: Path) -> None:
    add(shared(tmp_path), 1)
    (tmp_path / ".ledger.0123").write_text("[9]")
    (tmp_path / "ledger.x").write_text("[9]")
    (tmp_path / "ledger.2.tmp").write_text("[9]")
    assert shared(tmp_path).load() == [1]
    same = shared(tmp_path).update(lambda before: (before or [], 7), lock_limit_s=1)
    assert same == 7  # an unchanged value writes nothing
    assert not (tmp_path / "ledger.2").exists()
    with pytest.raises(StoreUnusable, match="cannot be listed: No such file"):
        shared(tmp_path / "gone").load()
