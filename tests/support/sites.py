# SPDX-License-Identifier: Apache-2.0
"""A site's file for a test, and recorded machines."""

from collections.abc import Mapping
from pathlib import Path

from slurm_health.node import site as site_file
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.site import Site
from slurm_health.preflight.config import refuse_unreadable
from tests.lab.site_files import write_site as write_site


def load_site(directory: Path, text: str) -> Site:
    """Write and read a site's file that belongs to whoever runs the test, as a command reads it."""
    return site_file.load(write_site(directory, text), refuse_unreadable)


def tree(root: Path, files: Mapping[str, str]) -> CheckContext:
    """Lay out files of a machine under a directory."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CheckContext(root=root, now_s=1_000_000.0)
