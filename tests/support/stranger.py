# SPDX-License-Identifier: Apache-2.0
"""A user to whom what root keeps for itself is closed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_UID = 4242


def as_stranger(
    *words: str, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Call slurm-health as that user, once root has loaded it."""
    code = (
        "import os, sys\nfrom slurm_health.cli.main import main\n"
        f"os.setuid({_UID})\nsys.argv = {['slurm-health', *words]!r}\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def given_to(uid: int, *paths: Path) -> None:
    """Make another user the owner of paths and of all that is below them."""
    for path in paths:
        for each in (path, *path.rglob("*")):
            os.chown(each, uid, uid, follow_symlinks=False)
