# SPDX-License-Identifier: Apache-2.0
"""Whose ids are that /etc/subuid gives for containers."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from slurm_health.system.accounts import Accounts

DAEMON = pwd.getpwnam("daemon").pw_uid


@pytest.mark.parametrize(
    ("uid", "user"),
    [
        (99_999, 99_999),
        (100_000, DAEMON),
        (165_535, DAEMON),
        (165_536, 4242),
        (231_072, 231_072),  # of one whom this machine does not know
        (300_000, 300_000),  # of root's containers
        (400_000, 400_000),
        (DAEMON, DAEMON),
        (0, 0),
        (-1, -1),
    ],
)
def test_what_a_user_was_given_for_containers_is_theirs(
    tmp_path: Path, uid: int, user: int
) -> None:
    file = tmp_path / "subuid"
    file.write_text(
        "daemon:100000:65536\n\n4242:165536:65536\nno-such-user:231072:65536\n"
        "root:300000:65536\n# daemon\ndaemon:x:1\ndaemon:400000\n:400000:1\n"
    )

    assert Accounts(file).user(uid) == user


def test_where_there_is_no_file_each_id_is_a_user(tmp_path: Path) -> None:
    assert Accounts(tmp_path / "subuid").user(100_000) == 100_000


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("4242:100000:65536\n")
    accounts = Accounts(file)
    assert accounts.user(200_000) == 200_000

    file.write_text("4242:100000:65536\n4242:200000:65536\n")

    assert accounts.user(200_000) == 4242
