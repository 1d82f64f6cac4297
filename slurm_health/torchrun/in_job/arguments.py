# SPDX-License-Identifier: Apache-2.0
"""Reads a torchrun command line with torchrun's own parser, in the job's own interpreter.

`slurm-health run` starts this file with that interpreter. So the options are those of the job's
torchrun, with its abbreviations and its refusals. The first argument is the number of an open file
that takes what was read, as JSON; the second holds our own options, also as JSON.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import os
import signal
import sys
from typing import Any, NamedTuple, NoReturn


class Option(NamedTuple):
    """One option of `slurm-health run` that torchrun does not have; a flag has no metavar."""

    name: str
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        """The name of its value among those that a parser returns."""
        return self.name.replace("-", "_")


_NO_SCRIPT = (
    "no SCRIPT to train with: it follows the options, as in slurm-health run --nnodes=2 train.py"
)
# What `run` needs to know, or fills in if it is not given.
READ = (
    "nnodes",
    "node_rank",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "master_addr",
    "master_port",
    "max_restarts",
)


def read(argv: list[str], parser: argparse.ArgumentParser, options: list[Option]) -> dict[str, Any]:
    """Return what a command line says; `parser` is torchrun's, and ends the process on an error."""
    add_options(parser, options)
    unset = argparse.Namespace(**dict.fromkeys(READ))
    known = vars(parser.parse_args(argv, unset))
    program = len(argv) - len(known["training_script_args"]) - 1
    if argv[program] != known["training_script"]:
        program -= 1  # a `--` after the script, which torchrun does not pass on
    for name in READ:  # the parser has torchrun's PET_ variables as defaults
        if known[name] is None and f"PET_{name.upper()}" in os.environ:
            known[name] = parser.get_default(name)
    own = argparse.ArgumentParser(add_help=False)
    add_options(own, options)
    head = argv[:program]
    dashes = ["--"] if head[-1:] == ["--"] else []
    _, torchruns = own.parse_known_args(head[: len(head) - len(dashes)])
    return {
        "options": torchruns,
        "program": [*dashes, *argv[program:]],
        "given": {name: str(known[name]) for name in READ if known[name] not in (None, "")},
        "standalone": bool(known.get("standalone")),
        "own": {option.name: value for option in options if (value := known[option.dest])},
    }


def add_options(parser: argparse.ArgumentParser, options: list[Option]) -> None:
    """Add our options, in a group of their own."""
    parser.conflict_handler = "resolve"  # ours win over those that a later torchrun may have
    group = parser.add_argument_group("slurm-health")
    for option in options:
        spellings = dict.fromkeys([f"--{option.name}", f"--{option.dest}"])
        text = option.help.replace("%", "%%")  # argparse expands what follows a percent sign
        if option.metavar:
            group.add_argument(*spellings, metavar=option.metavar, help=text)
        else:
            group.add_argument(*spellings, action="store_true", help=text)


def suggestion(refusal: str, parser: argparse.ArgumentParser) -> str:
    """Return the known options that resemble those refused, empty if none does."""
    known = [spelling for action in parser._actions for spelling in action.option_strings]
    names = [word.partition("=")[0] for word in refusal.split() if word.startswith("--")]
    meant = [match for name in names for match in difflib.get_close_matches(name, known, n=1)]
    return f"; did you mean {', '.join(meant)}?" if meant else ""


def wrong_processes(number: str) -> str:
    """Return why torchrun cannot start so many processes here, empty if it can."""
    if number.isdigit():
        return ""
    from torch.distributed.run import determine_local_world_size

    try:
        determine_local_world_size(number)
    except ValueError as err:
        return f"--nproc-per-node: {err}"
    return ""


def main() -> None:
    """Read the command line and write what it says."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the seconds that torch loads
    gc.disable()  # there is no garbage in what is being loaded, and the search takes time
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as err:
        sys.exit(f"slurm-health: --python: {sys.executable}: cannot load torchrun: {err}")

    parser = get_args_parser()
    parser.prog = "slurm-health run"
    parser.usage = "slurm-health run [options of slurm-health and of torchrun] SCRIPT [ARGS...]"

    def refuse(refusal: str) -> NoReturn:
        if "training_script" in refusal:
            refusal = _NO_SCRIPT
        elif refusal.startswith("unrecognized"):
            refusal += suggestion(refusal, parser)
        parser.print_usage(sys.stderr)
        sys.stderr.write(f"{parser.prog}: error: {refusal}\n")
        sys.exit(2)

    vars(parser)["error"] = refuse  # torchrun makes its parser, and argparse has no other way in
    options = [Option(*option) for option in json.loads(sys.argv[2])]
    words = read(sys.argv[3:], parser, options)
    known = parser.parse_args(sys.argv[3:])
    if wrong := wrong_processes(known.nproc_per_node):
        refuse(wrong)
    script = known.training_script
    if not (known.module or known.no_python or os.path.exists(script)):  # noqa: PTH110 - as Python looks for it
        # No misuse: other nodes may have it, so this node reports it itself.
        sys.exit(f"slurm-health: {script}: there is no such script in {os.getcwd()}")  # noqa: PTH109 - as above
    with os.fdopen(int(sys.argv[1]), "w") as file:
        json.dump(words, file)


if __name__ == "__main__":
    main()
