# SPDX-License-Identifier: Apache-2.0
"""What only the nodes of a run know, where they are told."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from slurm_health.records.errors import ConfigError

VARIABLE = "SLURM_HEALTH_SECRET"
OPTION = "secret-file"
# One who has seen a handshake could find a shorter one by trying.
LEAST_BYTES = 16
_MOST_BYTES = 65536
_KUBERNETES = "defaultMode: 0400 of the secret's volume"
_MAKE_ONE = "make one with: openssl rand -hex 32"


def read(file: str | None, environ: Mapping[str, str]) -> bytes:
    """Return the secret of a file or of the environment, nothing where neither is given.

    Raises:
        ConfigError: it cannot be read, others may read it too, or it is too short to be one.
    """
    if file is None:
        text = environ.get(VARIABLE)
        return b"" if text is None else _checked("environment", VARIABLE, text.encode())
    try:
        with Path(file).open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            found = opened.read(_MOST_BYTES)
    except OSError as err:
        raise ConfigError(f"--{OPTION}", file, f"cannot be read: {err.strerror}") from err
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        problem = f"others may read or change it; fix: chmod 600 {file} (Kubernetes: {_KUBERNETES})"
        raise ConfigError(f"--{OPTION}", file, problem)
    return _checked(f"--{OPTION}", file, found)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that others may have: the secret is not in it."""
    return {name: value for name, value in environ.items() if name != VARIABLE}


def _checked(source: str, key: str, secret: bytes) -> bytes:
    secret = secret.strip()
    if len(secret) < LEAST_BYTES:
        problem = f"a secret needs at least {LEAST_BYTES} characters, this has {len(secret)}"
        raise ConfigError(source, key, f"{problem}; {_MAKE_ONE}")
    return secret
