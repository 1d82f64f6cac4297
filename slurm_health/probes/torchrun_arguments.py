# SPDX-License-Identifier: Apache-2.0
"""Reads a torchrun command line with torchrun's own parser, in the job's own interpreter.

`slurm-health run` starts this file with that interpreter, so that whatever torchrun the job has,
its options are known, its abbreviations work and its refusals are its own. Needs nothing but
torch; writes what it read, as JSON, to the open file whose number is its first argument.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option of `slurm-health run` that torchrun does not have."""

    name: str
    metavar: str | None
    help: str


OPTIONS = (
    Option(
        "--network-check",
        None,
        "Check the nodes before training: all multiply matrices and exchange data with changing"
        " partners until each is decided. Training starts without the faulty ones if --nnodes"
        " allows it, and not at all otherwise.",
    ),
    Option(
        "--straggler-detection",
        None,
        "Check the nodes before training with training steps: pairs of them train a GPT of the"
        " size that fits, and each node's arithmetic is told from the communication. Alone, or"
        " after --network-check on the nodes that it leaves.",
    ),
    Option(
        "--exclude-straggler",
        None,
        "Check, and treat a slow node like a faulty one. Without this it is named and trains.",
    ),
    Option(
        "--journal",
        "DIR",
        "Where the journal of the check is kept; all nodes must share it [default:"
        " SLURM_HEALTH_JOURNAL, else the site's choice, else ~/.slurm-health/journal].",
    ),
    Option(
        "--python",
        "PATH",
        "The interpreter that checks and trains [default: python3 on PATH if it has torch, else"
        " slurm-health's own].",
    ),
)
# What is filled in from the surroundings where it is not given.
FILLED = (
    "nnodes",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "master_addr",
    "master_port",
)


def read(argv: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what a command line says; `parser` is torchrun's, and ends the process on an error."""
    add_options(parser)
    unset = argparse.Namespace(**dict.fromkeys(FILLED))
    known = vars(parser.parse_args(argv, unset))
    program = len(argv) - len(known["training_script_args"]) - 1
    if argv[program] != known["training_script"]:
        program -= 1  # a `--` after the script, which torchrun does not pass on
    own = argparse.ArgumentParser(add_help=False)
    add_options(own)
    head = argv[:program]
    dashes = ["--"] if head[-1:] == ["--"] else []
    _, torchruns = own.parse_known_args(head[: len(head) - len(dashes)])
    return {
        "options": torchruns,
        "program": [*dashes, *argv[program:]],
        "given": {name: value for name in FILLED if (value := _given(name, known, parser))},
        "standalone": bool(known.get("standalone")),
        **{name: known[name] for name in (_dest(option) for option in OPTIONS)},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our options, in a group of their own."""
    parser.conflict_handler = "resolve"  # ours win over those a later torchrun may have
    group = parser.add_argument_group("slurm-health")
    for option in OPTIONS:
        spellings = dict.fromkeys([option.name, "--" + _dest(option)])
        if option.metavar is None:
            group.add_argument(*spellings, action="store_true", help=option.help)
        else:
            group.add_argument(*spellings, metavar=option.metavar, help=option.help)


def _dest(option: Option) -> str:
    return option.name[2:].replace("-", "_")


def _given(name: str, known: dict[str, Any], parser: argparse.ArgumentParser) -> str:
    """Return the value of an option from the command line or torchrun's variable, else nothing."""
    value = known[name]
    if value is None and f"PET_{name.upper()}" in os.environ:
        value = parser.get_default(name)
    return "" if value is None else str(value)


def main() -> None:
    """Read the command line and write what it says."""
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as err:
        sys.exit(f"slurm-health: --python: {sys.executable}: cannot load torchrun: {err}")

    parser = get_args_parser()
    parser.prog = "slurm-health run"
    parser.usage = "slurm-health run [options of slurm-health and of torchrun] SCRIPT [ARGS...]"
    found = read(sys.argv[2:], parser)
    with os.fdopen(int(sys.argv[1]), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
