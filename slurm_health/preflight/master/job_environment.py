# SPDX-License-Identifier: Apache-2.0
"""What a job trains in: the interpreter that runs the probes, and what a file of its user sets.

A batch script often exports what NCCL is to use, loads modules or activates an environment. A check
before that script knows none of it, so it reads the same file first (`--setup`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.preflight.chosen_probes import FIND_TORCH
from slurm_health.records.errors import ConfigError
from slurm_health.system.processes import ask_python, run
from slurm_health.system.signals import exit_text

_FIND_TORCH_S = 30.0
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


def _has_torch(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = ask_python(python, FIND_TORCH, environ=environ, deadline_s=_FIND_TORCH_S)
    except OSError:  # it cannot be executed, or does not end
        return False
    return done.returncode == 0


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
