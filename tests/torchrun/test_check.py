# SPDX-License-Identifier: Apache-2.0
"""The secret that only the nodes of a run know."""

from __future__ import annotations

import pytest

from slurm_health.records.errors import ConfigError
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.check import KEY_VARIABLE, key_of, without_secret

ARGUMENTS = Arguments(options=[], program=["train.py"], given={"rdzv_id": "night"})


def test_the_secret_comes_from_the_environment_and_goes_to_no_one_else() -> None:
    environ = {KEY_VARIABLE: "one that is long enough\n", "PATH": "/bin"}
    assert key_of(ARGUMENTS, environ) == b"one that is long enough"
    assert key_of(ARGUMENTS, {}).endswith(b"night")
    assert without_secret(environ) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "short", " " * 40])
def test_what_is_too_short_to_be_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        key_of(ARGUMENTS, {KEY_VARIABLE: text})
