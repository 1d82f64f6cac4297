# SPDX-License-Identifier: Apache-2.0
"""What can be seen at submission that would let the job run unchecked, or checked for less.

The job is submitted all the same: its nodes may have what this machine lacks. Where that cannot be
known from here, nothing is said. Torch is never loaded: on the usual way two directories are read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from slurm_health.preflight import config
from slurm_health.preflight.chosen_probes import FIND_TORCH, asks_for_light
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.options import MAGIC
from slurm_health.preflight.sbatch.script import header
from slurm_health.records.errors import ConfigError
from slurm_health.system.killable import Answered, Hung, run_one
from slurm_health.system.proc import mount_of, mounted
from slurm_health.system.processes import ask_python

# A submission waits no longer for a filesystem, or for an interpreter that is asked for torch.
_LOOK_S = 2.0
_NO_TORCH = 1  # what that exits with; an interpreter that fails by itself may, too
_TORCH = "lib*/python3*/*-packages/torch/__init__.py"  # below the prefix of an installation
_PROGRAM = b"\x7fELF"  # a compiled interpreter; who knows what a script does first
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OF_ONE_MACHINE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - only compared with
# Filesystems of a disk: where such a directory is another mount, it may well be shared.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay"})
_GPUS = frozenset({"gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres"})
# A line that makes an environment which the check, before the script, knows nothing of.
_ACTIVATES = re.compile(
    r"\s*(?:(?:source|\.)\s+(?P<prefix>\S+)/bin/activate\b|(?:source|\.)\s+\S*activate\b"
    r"|(?:conda|mamba|micromamba|pyenv)\s+activate\b|(?:module\s+(?:load|add|swap)|ml)\s+\w"
    r"|spack\s+(?:load|env)\b|(?:uv|poetry|pixi|pdm|hatch|conda)\s+run\b)"
)


def warnings(
    spec: JobSpec,
    script: bytes,
    title: str,
    *,
    asked: Mapping[str, str],
    environ: Mapping[str, str],
    python: str,
) -> list[str]:
    """Return what is to be said of a job that is submitted with these settings.

    Args:
        spec: what is asked for.
        script: the job's script.
        title: what the user calls it.
        asked: sbatch's options.
        environ: the environment of the submission.
        python: the interpreter that runs slurm-health, and the probes where the job's has no torch.
    """
    trouble = _about_journal(spec, environ)
    if spec.setup is not None and not os.access(spec.setup, os.R_OK):
        trouble.append(
            f"--setup={spec.setup}: cannot be read here; if the nodes find the same, the job runs"
            " UNCHECKED"
        )
    begun = len(header(script))
    for number, line in enumerate(script.split(b"\n"), start=1):
        if number > begun and line.startswith(MAGIC + b" --"):
            trouble.append(
                f"line {number} of {title}: #HEALTH after the first command is ignored, as #SBATCH"
                " is; move it up"
            )
            break
    # In an image, or with another PATH, another interpreter has the name; a setup may change both.
    elsewhere = asked.keys() & {"container", "container-image"} or spec.setup is not None
    inherits = asked.get("export", "ALL").split(",")[0] == "ALL"
    if not elsewhere and inherits and not asks_for_light(spec.check):
        may_train = bool(asked.keys() & _GPUS)
        trouble += _about_torch(spec.python, script, title, environ, python, may_train=may_train)
    return trouble


def _about_journal(spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    try:
        root = config.journal_root(spec.journal, environ)
    except ConfigError as err:
        return [f"{err}; where that is so on the nodes, the job runs UNCHECKED"]

    def look() -> bytes:
        return os.fsencode(_trouble_with(root))

    match run_one(look, _LOOK_S):
        case Answered(data=data) if data:
            return [f"the journal {root} {os.fsdecode(data)}; another directory: --journal=DIR"]
        case Hung():
            why = f"its filesystem did not answer within {_LOOK_S:g} s"
            return [
                f"the journal {root}: {why}; if the nodes find the same, the job runs UNCHECKED"
            ]
        case _:
            return []


def _trouble_with(root: Path) -> str:
    """Say why a journal here cannot be used by all nodes, empty where nothing tells so."""
    there = next(path for path in (root, *root.parents) if os.access(path, os.F_OK))
    if not os.access(there, os.W_OK | os.X_OK):
        return f"cannot be made, as {there} cannot be written here: the job runs UNCHECKED"
    real = os.path.realpath(there)
    kind = mount_of(mounted(), real).kind
    local = any(Path(real).is_relative_to(one) for one in _OF_ONE_MACHINE)
    if kind in _IN_MEMORY or (local and kind in _ON_DISK):
        return (
            f"lies on this machine alone ({kind}): nodes cannot share it, so a job of several"
            " nodes runs UNCHECKED, and slurm-health report finds no job's journal"
        )
    return ""


def _about_torch(
    chosen: str | None,
    script: bytes,
    title: str,
    environ: Mapping[str, str],
    python: str,
    *,
    may_train: bool,
) -> list[str]:
    """Say that torch is missing if something shows that the job wants it.

    `chosen` is the value of --python, `python` the interpreter of slurm-health.
    """
    lines = os.fsdecode(script).splitlines()
    matches = ((number, _ACTIVATES.match(line)) for number, line in enumerate(lines, start=1))
    number, activation = next((one for one in matches if one[1]), (0, None))
    if not (chosen or may_train or activation):
        return []
    job_python = shutil.which(chosen or "python3", path=environ.get("PATH"))
    if chosen and job_python is None:
        lacks = f"--python={chosen}: no such executable here; if the nodes lack it too"
        return [f"{lacks}, the job runs UNCHECKED"]
    interpreters = [job_python, None if chosen else python]
    tried = list(dict.fromkeys(one for one in interpreters if one))
    if any(may_have_torch(one, environ) for one in tried):
        return []
    how = "name the interpreter it trains with: #HEALTH --python=PATH"
    if activation:
        prefix = os.path.expanduser(activation["prefix"] or "")  # noqa: PTH111 - text in, text out
        if prefix and os.access(Path(prefix, "bin", "python"), os.F_OK):
            how = f"name the interpreter it trains with: #HEALTH --python={prefix}/bin/python"
        line = f"line {number} of {title} ({activation.string.strip()})"
        into_file = "put what activates it into a file: #HEALTH --setup=FILE"
        how = f"{line} comes after the check: {how}, or {into_file}"
    lack = f"no torch found by {' or '.join(tried)}: where the nodes have none either, light probes"
    return [f"{lack} check them, which see no GPU and no NCCL; if the job trains with torch, {how}"]


def may_have_torch(python: str, environ: Mapping[str, str]) -> bool:
    """Tell whether an interpreter has torch, or nothing shows it from here."""
    path = Path(python)
    try:
        with path.open("rb") as program:
            if program.read(len(_PROGRAM)) != _PROGRAM:
                return True
    except OSError:
        return True
    prefixes = {path.parent.parent, path.resolve().parent.parent}  # of an environment, of its base
    if any(any(prefix.glob(_TORCH)) for prefix in prefixes):
        return True
    try:
        done = ask_python(python, FIND_TORCH, environ=environ, deadline_s=_LOOK_S)
    except (OSError, TimeoutError):
        return True
    return done.returncode != _NO_TORCH
