# SPDX-License-Identifier: Apache-2.0
"""Whether the journal's filesystem answers: whoever asks one that hangs waits for ever."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_health.records.errors import JournalError
from slurm_health.system.killable import Hung, run_one

# A server that fails over is back sooner.
LIMIT_S = 60.0


def await_answer(root: Path, limit_s: float = LIMIT_S) -> None:
    """Let a child ask the filesystem first.

    Raises:
        JournalError: it did not answer.
    """

    def ask() -> bytes:
        os.statvfs(root)
        return b""

    if isinstance(run_one(ask, limit_s), Hung):
        raise JournalError(root, f"its filesystem did not answer within {limit_s:g} s")
