# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: read the command line, check if asked to, be torchrun."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.master.job_environment import find_python
from slurm_health.preflight.options import FOR_RUN, given_in
from slurm_health.records.errors import ConfigError, UsageError
from slurm_health.system.signals import leaving_on
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import find
from slurm_health.torchrun.starts import Training

# Of torchrun's options, those without a value.
_FLAGS = {"standalone", "module", "m", "no-python", "run-path", "virtual-local-rank"}
# What `run` needs to know, or fills in if it is not given.
_READ = {
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "max-restarts",
}


def train(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become torchrun, or return the code of a node on which nothing is trained.

    Raises:
        SlurmHealthError: the command line, the surroundings or the journal cannot be used.
    """
    try:
        python, arguments = read(argv, environ)
        training = Training(python, arguments, environ, find(arguments, environ))
    except UsageError as err:  # the same in all tasks: one reports it
        if environ.get("SLURM_PROCID", "0") == "0":
            raise
        return err.exit_code
    with leaving_on(signal.SIGTERM):  # ends what is in progress as an error would
        return training.run()


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Arguments]:
    """Return the interpreter to train with, and what the command line says.

    Raises:
        ConfigError: there is no such script or interpreter, or one of our options has an impossible
            value.
        NoTorch: there is no interpreter with torch.
        UsageError: there is no script.
    """
    takes_value = {option.name: bool(option.metavar) for option in FOR_RUN}
    known = {*takes_value, *_READ, *_FLAGS}
    words, options, own = list(argv), list[str](), list[str]()
    given = {name: environ.get(f"PET_{name.upper().replace('-', '_')}", "") for name in _READ}
    flags = {"standalone"} if environ.get("PET_STANDALONE", "0") != "0" else set()
    while words and words[0].startswith("-") and words[0] != "--":
        written, equals, value = (word := words.pop(0)).partition("=")
        name = written.lstrip("-").replace("_", "-")
        if written.startswith("--"):  # the beginning of a name will do, as for torchrun
            alike = sorted({name} & known or {full for full in known if full.startswith(name)})
            name = alike[0] if len(alike) == 1 else name
        near = difflib.get_close_matches(name, takes_value, n=1, cutoff=0.8)
        if name not in known and near:
            see = "(see slurm-health run --help)"
            raise UsageError(f"no option {written}; did you mean --{near[0]}? {see}")
        is_flag = name in _FLAGS or not takes_value.get(name, True)
        attached = equals or (not written.startswith("--") and written[2:])  # -t3
        taken = [word]
        if not (attached or is_flag) and words and not words[0].startswith("--"):
            taken.append(value := words.pop(0))
        if name in takes_value:
            own.append(f"--{name}={value}" if takes_value[name] else f"--{name}")
            continue
        options += taken
        if name in _READ:
            given[name] = value
        flags |= {name} if is_flag else set()
    if not (script := next((word for word in words if word != "--"), "")):
        raise UsageError(
            "no SCRIPT to train with: it follows the options, as in slurm-health run --nnodes=2"
            " train.py"
        )
    if not (flags & {"m", "module", "no-python"} or Path(script).exists()):
        raise ConfigError("SCRIPT", script, f"there is no such script in {Path.cwd()}")
    arguments = Arguments(
        options=options,
        program=words,
        given={name.replace("-", "_"): value for name, value in given.items() if value},
        standalone="standalone" in flags,
        own=given_in(own, "command line", FOR_RUN),
    )
    return find_python(arguments.text("python"), environ), arguments
