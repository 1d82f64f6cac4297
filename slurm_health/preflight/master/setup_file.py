# SPDX-License-Identifier: Apache-2.0
"""The environment that a job trains in, as a file of the user's makes it (`--setup`).

A batch script often exports what NCCL is to use, loads modules or activates an environment. A
check before that script knows none of it, so it reads the same file first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from slurm_health.records.errors import ConfigError
from slurm_health.system.processes import run
from slurm_health.system.signals import exit_text

# Modules and interpreters may come from a cold network filesystem.
DEADLINE_S = 120.0
# `set --` hides our arguments from the file, which may read its own. What it prints is discarded,
# and a process that it leaves in the background holds none of our pipes. No `||` behind `source`:
# `set -e` would mean nothing in the file. The zero byte ends what BASH_ENV has printed.
_SOURCE = """\
slurm_health_setup=$1 slurm_health_env=$2
set --
exec 3>&1
source "$slurm_health_setup" >/dev/null 2>&1 3>&-
slurm_health_code=$?
if [[ $slurm_health_code != 0 ]]; then exit "$slurm_health_code"; fi
printf '\\0' >&3
exec "$slurm_health_env" -0 >&3
"""
# Of the shell that read the file, not of what it sets.
_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD")


def environ_after(setup: str | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what an environment becomes when bash has sourced a file; as it is without one.

    Raises:
        ConfigError: the file cannot be read, fails, ends the shell or does not end.
    """
    if setup is None:
        return environ
    _require_readable(setup)
    bash, env = (_found(name, setup, environ) for name in ("bash", "env"))
    try:
        ended = run(
            [bash, "-c", _SOURCE, "bash", setup, env], environ=environ, deadline_s=DEADLINE_S
        )
    except TimeoutError:
        raise _unusable(setup, f"has not ended within {DEADLINE_S:g} s") from None
    except OSError as err:
        raise _unusable(setup, f"{bash} cannot be run: {err.strerror}") from err
    after = _parsed(ended.stdout)
    if ended.returncode != 0:
        how = exit_text(ended.returncode)
        raise _unusable(setup, f"failed ({how}): source it in a bash to see why")
    if not after:
        raise _unusable(setup, "ends the shell that reads it (exit); end it with return instead")
    kept = {name: environ[name] for name in _SHELLS_OWN if name in environ}
    return {**{name: after[name] for name in after if name not in _SHELLS_OWN}, **kept}


def _require_readable(setup: str) -> None:
    try:
        with Path(setup).open("rb") as file:
            file.read(1)
    except OSError as err:
        raise _unusable(setup, f"cannot be read on this node: {err.strerror}") from err


def _found(name: str, setup: str, environ: Mapping[str, str]) -> str:
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise _unusable(setup, f"needs {name}, which is not on PATH")
    return path


def _parsed(output: bytes) -> dict[str, str]:
    _, *entries = output.split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _unusable(setup: str, problem: str) -> ConfigError:
    return ConfigError("--setup", setup, problem)
