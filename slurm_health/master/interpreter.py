# SPDX-License-Identifier: Apache-2.0
"""Finds the interpreter that runs the probes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from slurm_health.errors import ConfigError
from slurm_health.probe_choice import FIND_TORCH
from slurm_health.processes import run

_FIND_TORCH_S = 30.0


def find_python(chosen: str | None, environ: Mapping[str, str]) -> str:
    """Return the interpreter that runs the probes: the chosen one, the job's own, or ours.

    Raises:
        ConfigError: none of them has torch.
    """
    if chosen is not None:
        path = shutil.which(chosen, path=environ.get("PATH"))
        if path is None:
            raise ConfigError("--python", chosen, "no such executable on this node")
        return path
    candidates = [shutil.which("python3", path=environ.get("PATH")), sys.executable]
    tried = list(dict.fromkeys(path for path in candidates if path))
    for path in tried:
        if _has_torch(path, environ):
            return path
    raise ConfigError(
        "--python",
        "torch",
        f"not found by {' or '.join(tried)}; name the interpreter your job trains with"
        " (in a script: #HEALTH --python=PATH),"
        " or install torch beside slurm-health: pip install 'slurm-health[probes]'",
    )


def _has_torch(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = run([python, "-c", FIND_TORCH], environ=environ, deadline_s=_FIND_TORCH_S)
    except OSError:  # it cannot be executed, or does not end
        return False
    return done.returncode == 0
