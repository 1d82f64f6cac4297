# SPDX-License-Identifier: Apache-2.0
"""Reads a torchrun command line with torchrun's own parser, in the job's own interpreter.

`slurm-health run` starts this file with that interpreter, so that whatever torchrun the job has,
its options are known, its abbreviations work and its refusals are its own. Needs nothing but
torch. Its first argument is the number of an open file, to which it writes what it read as JSON;
its second are our options, as JSON too.
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


_NO_SCRIPT = (
    "no SCRIPT to train with: it follows the options, as in slurm-health run --nnodes=2 train.py"
)
# What we need to know of, or fill in where it is not given.
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
    own = argparse.ArgumentParser(add_help=False)
    add_options(own, options)
    head = argv[:program]
    dashes = ["--"] if head[-1:] == ["--"] else []
    _, torchruns = own.parse_known_args(head[: len(head) - len(dashes)])
    return {
        "options": torchruns,
        "program": [*dashes, *argv[program:]],
        "given": {name: value for name in READ if (value := _given(name, known, parser))},
        "standalone": bool(known.get("standalone")),
        "own": {each.name: value for each in options if (value := known[_dest(each)])},
    }


def add_options(parser: argparse.ArgumentParser, options: list[Option]) -> None:
    """Add our options, in a group of their own."""
    parser.conflict_handler = "resolve"  # ours win over those a later torchrun may have
    group = parser.add_argument_group("slurm-health")
    for option in options:
        spellings = dict.fromkeys([f"--{option.name}", f"--{_dest(option)}"])
        # argparse expands what follows a percent sign.
        text = option.help.replace("%", "%%")
        if option.metavar:
            group.add_argument(*spellings, metavar=option.metavar, help=text)
        else:
            group.add_argument(*spellings, action="store_true", help=text)


def suggestion(said: str, parser: argparse.ArgumentParser) -> str:
    """Return what may have been meant by options that are not known, nothing if that is unclear."""
    known = [spelling for action in parser._actions for spelling in action.option_strings]
    meant = []
    for word in said.split():
        name = word.partition("=")[0]
        if name.startswith("--"):
            meant += difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {', '.join(meant)}?" if meant else ""


def wrong_processes(number: str) -> str:
    """Return why torchrun cannot start so many processes here, nothing where it can."""
    if number.isdigit():
        return ""
    from torch.distributed.run import determine_local_world_size

    try:
        determine_local_world_size(number)
    except ValueError as err:
        return f"--nproc-per-node: {err}"
    return ""


def _dest(option: Option) -> str:
    return option.name.replace("-", "_")


def _given(name: str, known: dict[str, Any], parser: argparse.ArgumentParser) -> str:
    """Return the value of an option from the command line or torchrun's variable, else nothing."""
    value = known[name]
    if value is None and f"PET_{name.upper()}" in os.environ:
        value = parser.get_default(name)
    return "" if value is None else str(value)


def main() -> None:
    """Read the command line and write what it says."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch loads for seconds, and shows where
    gc.disable()  # it finds nothing in what is being loaded, and takes its time
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as err:
        sys.exit(f"slurm-health: --python: {sys.executable}: cannot load torchrun: {err}")

    parser = get_args_parser()
    parser.prog = "slurm-health run"
    parser.usage = "slurm-health run [options of slurm-health and of torchrun] SCRIPT [ARGS...]"

    def refuse(said: str) -> NoReturn:
        if "training_script" in said:
            said = _NO_SCRIPT
        elif said.startswith("unrecognized"):
            said += suggestion(said, parser)
        parser.print_usage(sys.stderr)
        sys.stderr.write(f"{parser.prog}: error: {said}\n")
        sys.exit(2)

    vars(parser)["error"] = refuse  # torchrun makes its parser, and argparse has no other way in
    options = [Option(*each) for each in json.loads(sys.argv[2])]
    found = read(sys.argv[3:], parser, options)
    known = parser.parse_args(sys.argv[3:])
    if wrong := wrong_processes(known.nproc_per_node):
        refuse(wrong)
    script = known.training_script
    if not (known.module or known.no_python or os.path.exists(script)):  # noqa: PTH110 - as Python looks for it
        # Not a misuse: it may be there on other nodes, and this one has to say so itself.
        sys.exit(f"slurm-health: {script}: there is no such script in {os.getcwd()}")  # noqa: PTH109 - as above
    with os.fdopen(int(sys.argv[1]), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
