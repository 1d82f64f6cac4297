# SPDX-License-Identifier: Apache-2.0
"""Finds the interpreter that runs the probes, and which probes these are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.preflight.probe_choice import FIND_TORCH
from slurm_health.records.errors import ConfigError
from slurm_health.system.processes import ask_python

_FIND_TORCH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The interpreter that runs the probes; `light` says why these are the light ones, if they are.

    Light probes run in slurm-health's own on every node.
    """

    python: str
    light: str = ""


class NoTorch(ConfigError):
    """None of the interpreters that were tried has torch."""

    def __init__(self, tried: Sequence[str]) -> None:
        self.tried = tried
        super().__init__(
            "--python",
            "torch",
            f"not found by {' or '.join(tried)}; name the interpreter your job trains with"
            " (in a script: #HEALTH --python=PATH),"
            " or install torch where slurm-health is installed: pip install 'slurm-health[probes]'",
        )


def find_interpreter(chosen: str | None, environ: Mapping[str, str], *, light: str) -> Interpreter:
    """Return the interpreter for the probes: one with torch, unless `light` says why without.

    One that was chosen is not asked for torch here: its probes say on each node if there is none.

    Raises:
        ConfigError: the one that was chosen is not there.
    """
    if light:
        return Interpreter(python=sys.executable, light=light)
    try:
        return Interpreter(python=find_python(chosen, environ))
    except NoTorch as err:
        return Interpreter(
            python=sys.executable, light=f"no torch found by {' or '.join(err.tried)}"
        )


def find_python(chosen: str | None, environ: Mapping[str, str]) -> str:
    """Return the interpreter with torch: the chosen one, the job's own, or ours.

    Raises:
        ConfigError: the one that was chosen is not there.
        NoTorch: none of them has torch.
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
    raise NoTorch(tried)


# A wheel for CPUs has no version of CUDA or ROCm in this file: torch itself need not be loaded.
_COUNT_DEVICES = """
import importlib.util as u, pathlib
s = u.find_spec("torch")
v = pathlib.Path(s.origin).with_name("version.py").read_text() if s and s.origin else ""
cpu = all(f"{n} = None" in v or n not in v for n in ("cuda: Optional[str]", "hip: Optional[str]"))
print(0 if cpu else __import__("torch").cuda.device_count())
"""


def devices_of_torch(python: str, environ: Mapping[str, str]) -> int:
    """Return how many accelerators an interpreter's torch sees, 0 where that cannot be told.

    For machines whose driver shows none in /proc, as under WSL.
    """
    try:
        done = ask_python(python, _COUNT_DEVICES, environ=environ, deadline_s=_FIND_TORCH_S)
    except OSError:  # it cannot be executed, or does not end
        return 0
    said = done.stdout.decode(errors="replace").split()
    return int(said[-1]) if done.returncode == 0 and said and said[-1].isdecimal() else 0


def _has_torch(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = ask_python(python, FIND_TORCH, environ=environ, deadline_s=_FIND_TORCH_S)
    except OSError:  # it cannot be executed, or does not end
        return False
    return done.returncode == 0
