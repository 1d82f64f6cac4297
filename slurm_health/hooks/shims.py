# SPDX-License-Identifier: Apache-2.0
"""The scripts that slurm.conf names: written for this installation, and read back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import slurm_health

# The key of slurm.conf that names each.
SHIMS = {
    "Prolog": "prolog/slurm-health",
    "Epilog": "epilog/slurm-health",
    "HealthCheckProgram": "prolog/slurm-health-healthcheck",
}
DIRECTORY = "/etc/slurm-health"
# The lines that a site may edit.
_LINE = re.compile(r"^(python|config|slurm|limit)=(.*)$", re.MULTILINE)
_PATH = re.compile(r"^PATH=(.*)$", re.MULTILINE)


def settings(text: str) -> dict[str, str]:
    """Return what a shim says in the lines that a site edits."""
    return {key: value.strip().strip("\"'") for key, value in _LINE.findall(text)}


def search_path(text: str) -> str:
    """Return where a shim looks for commands."""
    found = _PATH.search(text)
    return found[1].replace("$slurm", settings(text).get("slurm", "")) if found else ""


def install(directory: Path, python: str) -> dict[str, Path]:
    """Write the shims, to be run by this interpreter; return where, by the key of slurm.conf.

    One that stands there already keeps what a site has set in it. Slurm may start one at any
    time, so each is replaced whole.

    Raises:
        OSError: one cannot be written.
    """
    paths = {key: directory / name for key, name in SHIMS.items()}
    for key, path in paths.items():
        said = {**(settings(_text(path)) if path.exists() else {}), "python": python}
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(os.fsencode(_edited(_source(key), said)))
        fresh.chmod(0o755)
        fresh.replace(path)
    return paths


def _text(path: Path) -> str:
    """Read what a site has edited, in whatever encoding: its own bytes are written again."""
    return os.fsdecode(path.read_bytes())


def _edited(text: str, said: Mapping[str, str]) -> str:
    return _LINE.sub(lambda line: f"{line[1]}={shlex.quote(said.get(line[1], line[2]))}", text)


def _source(key: str) -> str:
    """Return a shim as it is in the package, or beside it in a checkout."""
    package = Path(slurm_health.__file__).parent
    path = package / SHIMS[key]
    return (path if path.exists() else package.parent / SHIMS[key]).read_text()
