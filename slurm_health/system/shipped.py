# SPDX-License-Identifier: Apache-2.0
"""Files that come with slurm-health beside its code: what people copy, and what they read."""

from __future__ import annotations

from pathlib import Path

import slurm_health


def path(name: str) -> Path:
    """Return where a file or directory is: in the package, or beside it in a checkout."""
    package = Path(slurm_health.__file__).parent
    installed = package / name
    return installed if installed.exists() else package.parent / name
