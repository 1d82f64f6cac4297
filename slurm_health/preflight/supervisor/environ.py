# SPDX-License-Identifier: Apache-2.0
"""Environments as bytes, which Slurm gave to the job, and as text, which our modules read."""

from __future__ import annotations

import os
from collections.abc import Mapping


def as_text(environ: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return an environment as text; `as_bytes` restores every byte."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def as_bytes(environ: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return an environment as bytes."""
    return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
