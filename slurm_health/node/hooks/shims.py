# SPDX-License-Identifier: Apache-2.0
"""The scripts that slurm.conf names: written for this installation, and read back."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slurm_health.system import templates
from slurm_health.system.templates import HOOKS

# Where each lies below the directory, by the key of slurm.conf that names it.
SHIMS = {key: hook.source for key, hook in HOOKS.items()}
DIRECTORY = "/etc/slurm-health"
_PATH = re.compile(r"^PATH=(.*)$", re.MULTILINE)


def search_path(text: str) -> str:
    """Return where a shim looks for commands."""
    found = _PATH.search(text)
    return found[1].replace("$slurm", templates.settings(text).get("slurm", "")) if found else ""


def install(directory: Path, python: str) -> dict[str, Path]:
    """Write the shims, to be run by this interpreter; return where, by the key of slurm.conf.

    One that stands there already keeps what a site has set in it. Slurm may start one at any
    time, so each is replaced whole.

    Raises:
        OSError: one cannot be written.
    """
    paths = {key: directory / name for key, name in SHIMS.items()}
    for key, path in paths.items():
        said = {**(templates.settings(_text(path)) if path.exists() else {}), "python": python}
        templates.write_script(path, templates.edited(HOOKS[key].text, said))
    return paths


def _text(path: Path) -> str:
    """Read what a site has edited, in whatever encoding: its own bytes are written again."""
    return os.fsdecode(path.read_bytes())
