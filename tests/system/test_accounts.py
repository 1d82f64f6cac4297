# SPDX-License-Identifier: Apache-2.0
"""Whose ids are that /etc/subuid gives for containers."""

import pwd
from pathlib import Path

from slurm_health.system.accounts import Accounts
from tests.support.rows import rows


@rows
def test_what_a_user_was_given_for_containers_is_theirs(
    tmp_path: Path, uid: int | None, user: int | None
) -> None:
    file = tmp_path / "subuid"
    file.write_text(
        "daemon:100000:65536\n\n4242:165536:65536\nno-such-user:231072:65536\n"
        "root:300000:65536\n# daemon\ndaemon:x:1\ndaemon:400000\n:400000:1\n"
    )
    daemon = pwd.getpwnam("daemon").pw_uid

    assert Accounts(file).user(daemon if uid is None else uid) == (daemon if user is None else user)
    assert Accounts(tmp_path / "gone").user(100_000) == 100_000


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("4242:100000:65536\n")
    accounts = Accounts(file)
    assert accounts.user(200_000) == 200_000

    file.write_text("4242:100000:65536\n4242:200000:65536\n")

    assert accounts.user(200_000) == 4242
