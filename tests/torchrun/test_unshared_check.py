# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.errors import ConfigError
from slurm_health.torchrun import unshared_check
from tests.torchrun.channel.test_node_zero import SECRET


def test_a_secret_comes_from_a_file_or_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    environ = {unshared_check.KEY_VARIABLE: "another one that is long enough"}
    assert unshared_check.read_secret(str(file), environ) == SECRET
    assert unshared_check.read_secret(None, environ) == b"another one that is long enough"
    assert unshared_check.read_secret(None, {}) == b""
    assert unshared_check.without_secret({**environ, "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "short", " " * 40])
def test_what_is_too_short_to_be_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        unshared_check.read_secret(None, {unshared_check.KEY_VARIABLE: text})


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        unshared_check.read_secret(str(tmp_path / "none"), {})


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620])
def test_a_secret_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        unshared_check.read_secret(str(file), {})
