# SPDX-License-Identifier: Apache-2.0
"""A site's file for a test, and recorded machines."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from slurm_health.node import site_settings as site_file
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.site_settings import Site
from slurm_health.preflight.config import refuse_unreadable


def write_site(directory: Path, text: str) -> Path:
    """Write a site's file that only its owner may write; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    path = directory / "config.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def load_site(directory: Path, text: str) -> Site:
    """Write and read a site's file that belongs to whoever runs the test, as a command reads it."""
    return site_file.load(write_site(directory, text), refuse_unreadable)


def let_root_drain(directory: Path) -> dict[str, str]:
    """Write rules by which root's jobs may drain, with a new ledger; the variable that says so."""
    place = Path(tempfile.mkdtemp(prefix="rules-", dir=directory))
    (place / "shared").mkdir(mode=0o755)
    file = write_site(place, f"[breaker]\ndirectory = '{place}/shared'\n")
    return {"SLURM_HEALTH_CONFIG": str(file)}


def tree(root: Path, files: Mapping[str, str]) -> CheckContext:
    """Lay out files of a machine under a directory."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CheckContext(root=root, now_s=1_000_000.0)
