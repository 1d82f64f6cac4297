# SPDX-License-Identifier: Apache-2.0
"""The site's file: what it says is taken, what it cannot mean is refused with line and key."""

import os
from pathlib import Path

import pytest

from slurm_health.node import site as site_file
from slurm_health.preflight import config
from slurm_health.records.errors import ConfigError
from tests.support.rows import rows
from tests.support.sites import load_site, write_site


@rows
def test_what_it_cannot_mean_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_site(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, None, -1])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int | None) -> None:
    path = write_site(tmp_path / "etc", "")
    if mode is None:
        path.parent.chmod(0o777)
    elif mode >= 0:
        path.chmod(mode)
    elif os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root gives a file away")
    with pytest.raises(ConfigError, match="can be written by others"):
        site_file.load(path)


def test_a_directory_of_roots_that_others_can_write_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    text = f'[hooks]\nstate = "{tmp_path / "link"}"'
    (tmp_path / "link").symlink_to(state)
    load_site(tmp_path, text)  # nothing is there yet

    state.mkdir(mode=0o700)
    load_site(tmp_path, text)

    state.chmod(0o777)
    with pytest.raises(ConfigError, match=r":2: state: .* that only root can write"):
        load_site(tmp_path, text)


@pytest.mark.root
def test_a_directory_of_roots_that_is_anothers_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(own)
    os.lchown(link, 12345, 12345)
    with pytest.raises(ConfigError, match="that only root can write"):
        load_site(tmp_path, f'[hooks]\nstate = "{link}"')

    os.chown(own, 12345, 12345)
    with pytest.raises(ConfigError, match="that only root can write"):
        load_site(tmp_path, f'[hooks]\nstate = "{own}"')


def test_the_same_file_tells_users_where_journals_go(tmp_path: Path) -> None:
    path = write_site(tmp_path, "journal = '/shared/j'\n[hooks]\n[checks.memory]\n")
    environ = {config.SITE_FILE_VARIABLE: str(path), "HOME": "/home/alice"}
    assert config.journal_root(None, environ) == Path("/shared/j")
