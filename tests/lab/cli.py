# SPDX-License-Identifier: Apache-2.0
"""The command line of the lab."""

import argparse
import contextlib
import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from . import directory, installing, requirements
from .errors import LabError
from .faults import Faults
from .lab import Lab
from .layout import BASE

DEFAULT_NAME = "lab"
# Until all nodes are idle: for any lab, and more for each node.
_START_S, _NODE_S = 60.0, 0.3
_INTERRUPTED = 130  # as a shell calls what SIGINT ended

_DESCRIPTION = """\
A disposable, real Slurm cluster on this machine, with real faults.

  python -m tests.lab up --nodes 6
  python -m tests.lab exec --user alice -- srun -N6 hostname
  python -m tests.lab fault slow-link n3 --mbit 200
  python -m tests.lab fault clear n3
  python -m tests.lab down
"""


def main(argv: list[str]) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with _termination_as_interrupt():
            return run(options)
    except LabError as err:
        print(f"lab: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return _INTERRUPTED


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- the commands ----------------------------------------------------------------------------------


def _install(options: argparse.Namespace) -> int:
    installing.install()
    return 0


def _make_root(options: argparse.Namespace) -> int:
    root = options.directory or installing.ROOTS / options.version
    installing.make_root(options.version, root)
    print(f"Slurm {options.version} is in {root} (python -m tests.lab up --release {root})")
    return 0


def _up(options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    extra = options.slurm_conf.read_text() if options.slurm_conf else ""
    lab = Lab.start(
        options.nodes,
        options.name,
        extra,
        options.release,
        cpus=options.cpus,
        memory_mb=options.memory_mb,
        gpus=options.gpus,
        accounting=options.accounting,
        network_filesystem_mb=options.network_filesystem_mb,
        detached=True,
        deadline_s=_START_S + options.nodes * _NODE_S,
    )
    print(
        f"lab {options.name}: {len(lab.nodes)} nodes idle after"
        f" {time.monotonic() - began_s:.1f} s; logs in {lab.paths.log}"
    )
    return 0


def _down(options: argparse.Namespace) -> int:
    requirements.require_root()
    running = directory.is_alive(BASE / options.name)
    if running:
        Lab.attach(options.name).stop()
    directory.sweep_dead()
    if not running:
        print(f"lab: no lab named {options.name!r} was running", file=sys.stderr)
    return 0


def _list(options: argparse.Namespace) -> int:
    for name in directory.living():
        print(name)
    return 0


def _exec(options: argparse.Namespace) -> int:
    requirements.require_root()
    lab = Lab.attach(options.name)
    env = dict(pair.partition("=")[::2] for pair in options.env)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LabError("exec: which command? (exec [--node n3] -- command argument...)")
    argv = lab.argv(command, user=options.user, node=options.node, env=env, cwd=options.cwd)
    sys.stdout.flush()
    os.execv(argv[0], argv)


def _fault(options: argparse.Namespace) -> int:
    requirements.require_root()
    lab = Lab.attach(options.name)
    given = {name: getattr(options, name) for name in options.parameters}
    getattr(lab.fault, options.method)(**given)
    return 0


def _chaos(options: argparse.Namespace) -> int:
    requirements.require(None)
    from .chaos import command  # it loads slurm-health, which the other commands do without

    seeds = range(options.seed, options.seed + options.runs)
    try:
        well = command.run_many(
            seeds, labs=options.labs, evidence=options.evidence, minutes=options.minutes
        )
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr, flush=True)
        # Threads wait for Slurm, for minutes perhaps. Their labs end with this process.
        os._exit(_INTERRUPTED)
    return 0 if well else 1


# -- their options ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help="which lab (default: %(default)s)")

    up = commands.add_parser("up", parents=[named], help="start a lab in the background")
    up.add_argument("--nodes", type=int, default=6, help="how many (default: %(default)s)")
    up.add_argument("--cpus", type=int, default=2, help="per node (default: %(default)s)")
    up.add_argument("--memory-mb", type=int, default=2000, help="per node (default: %(default)s)")
    up.add_argument("--gpus", type=int, default=0, help="played, per node (default: none)")
    up.add_argument(
        "--slurm-conf",
        type=_file,
        metavar="FILE",
        help="lines that replace or extend the lab's slurm.conf",
    )
    up.add_argument(
        "--network-filesystem-mb",
        type=int,
        default=0,
        metavar="MB",
        help="with a GlusterFS volume that each node mounts (default: none)",
    )
    up.add_argument("--accounting", action="store_true", help="with slurmdbd, on a MariaDB")
    up.add_argument(
        "--release", type=Path, metavar="DIR", help="another Slurm release, made by make-root"
    )
    up.set_defaults(run=_up)

    down = commands.add_parser("down", parents=[named], help="end a lab, leaving no trace")
    down.set_defaults(run=_down)

    listing = commands.add_parser("list", help="name the labs that run")
    listing.set_defaults(run=_list)

    execute = commands.add_parser(
        "exec",
        parents=[named],
        help="run a command inside",
        usage="python -m tests.lab exec [options] -- command argument...",
    )
    execute.add_argument("--node", help="default: the login node, where slurmctld runs too")
    execute.add_argument("--user", default="root", help="root, alice, bob (default: %(default)s)")
    execute.add_argument("--cwd", metavar="DIR", help="default: the user's home")
    execute.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="added to a clean environment",
    )
    execute.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    execute.set_defaults(run=_exec)

    fault = commands.add_parser("fault", help="break a node, or mend it")
    _add_faults(fault, named)

    chaos = commands.add_parser(
        "chaos", help="random trouble for real jobs, each on a cluster of its own"
    )
    chaos.add_argument("--runs", type=int, default=20, help="how many (default: %(default)s)")
    chaos.add_argument(
        "--seed", type=int, default=1, help="of the first run; each has the next (default: 1)"
    )
    chaos.add_argument("--labs", type=int, default=1, help="side by side (default: %(default)s)")
    chaos.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    chaos.add_argument(
        "--evidence",
        type=Path,
        metavar="DIR",
        default=Path("/var/tmp/slurm-health-chaos"),
        help="where the files of violations go (default: %(default)s)",
    )
    chaos.set_defaults(run=_chaos)

    install = commands.add_parser("install", help="install the distribution's packages")
    install.set_defaults(run=_install)

    make_root = commands.add_parser("make-root", help="install another Slurm release")
    make_root.add_argument("version", choices=sorted(installing.SUITES))
    make_root.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help=f"default: {installing.ROOTS}/VERSION",
    )
    make_root.set_defaults(run=_make_root)
    return parser


def _add_faults(fault: argparse.ArgumentParser, named: argparse.ArgumentParser) -> None:
    """Add a command for each fault: each method of `Faults` that breaks or mends one node."""
    kinds = fault.add_subparsers(metavar="KIND", required=True)
    for name, method in inspect.getmembers(Faults, inspect.isfunction):
        signature = inspect.signature(method)
        _, *parameters = signature.parameters.values()
        takes = [parameter.name for parameter in parameters]
        if name.startswith("_") or "faults" in takes:
            continue
        if signature.return_annotation is not None or takes[:1] != ["node"]:
            continue
        help_ = inspect.cleandoc(method.__doc__ or "").splitlines()[0].replace("%", "%%")
        words = name.replace("_", "-")
        parser = kinds.add_parser(words, parents=[named], help=help_, description=help_)
        for parameter in parameters:
            _add_parameter(parser, parameter)
        parser.set_defaults(run=_fault, method=name, parameters=takes)


def _add_parameter(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    name, default = parameter.name.replace("_", "-"), parameter.default
    if default is inspect.Parameter.empty:
        parser.add_argument(parameter.name, metavar=name.upper(), type=parameter.annotation)
    elif parameter.name == "device":
        parser.add_argument("device", metavar="GPU", nargs="?", type=int, default=default)
    elif parameter.annotation is bool:
        parser.add_argument(f"--{name}", action="store_true")
    elif parameter.annotation in (int, float):
        help_ = "default: %(default)g"
        parser.add_argument(f"--{name}", type=parameter.annotation, default=default, help=help_)
    else:  # a number, or None
        help_ = f"0: always (default: {default or 0})"
        kind: Callable[[str], int | None] = lambda text: int(text) or None  # noqa: E731
        parser.add_argument(f"--{name}", type=kind, default=default, help=help_)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no file {text!r}")
    return path
