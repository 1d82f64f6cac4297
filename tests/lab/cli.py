# SPDX-License-Identifier: Apache-2.0
"""The command line of the lab."""

import contextlib
import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from . import directory, installing, requirements
from .errors import LabError
from .faults import Faults
from .lab import Lab
from .layout import BASE

# Until all nodes are idle: for any lab, and more for each node.
_START_S, _NODE_S = 60.0, 0.3
_INTERRUPTED = 130  # as a shell calls what SIGINT ended
_named = click.option("--name", default="lab", show_default=True, help="Which lab.")
_DIRECTORY = click.Path(path_type=Path)


def main(argv: list[str]) -> int:
    """Run one command; the exit code."""
    try:
        with _termination_as_interrupt():
            return commands.main(argv, "python -m tests.lab", standalone_mode=False) or 0
    except click.ClickException as err:
        err.show()
        return err.exit_code
    except LabError as err:
        print(f"lab: {err}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
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


@click.group()
def commands() -> None:
    """A disposable, real Slurm cluster on this machine, with real faults.

    \b
    python -m tests.lab up --nodes 6
    python -m tests.lab exec --user alice -- srun -N6 hostname
    python -m tests.lab fault slow-link n3 --mbit 200
    python -m tests.lab fault clear n3
    python -m tests.lab down
    """


@commands.command()
@_named
@click.option("--nodes", default=6, show_default=True)
@click.option("--gpus", default=0, help="Played, per node.  [default: none]")
@click.option(
    "--network-filesystem-mb",
    default=0,
    metavar="MB",
    help="With a GlusterFS volume that each node mounts.  [default: none]",
)
@click.option("--accounting", is_flag=True, help="With slurmdbd, on a MariaDB.")
@click.option("--release", type=_DIRECTORY, help="Another Slurm release, made by make-root.")
def up(nodes: int, name: str, **options: Any) -> None:
    """Start a lab in the background."""
    began_s = time.monotonic()
    deadline_s = _START_S + nodes * _NODE_S
    lab = Lab.start(nodes, name, detached=True, deadline_s=deadline_s, **options)
    took_s = time.monotonic() - began_s
    print(f"lab {name}: {nodes} nodes idle after {took_s:.1f} s; logs in {lab.paths.log}")


@commands.command()
@_named
def down(name: str) -> None:
    """End a lab, leaving no trace."""
    requirements.require_root()
    running = directory.is_alive(BASE / name)
    if running:
        Lab.attach(name).stop()
    directory.sweep_dead()
    if not running:
        print(f"lab: no lab named {name!r} was running", file=sys.stderr)


@commands.command("list")
def list_labs() -> None:
    """Name the labs that run."""
    for name in directory.living():
        print(name)


@commands.command("exec")
@_named
@click.option("--node", help="Default: the login node, where slurmctld runs too.")
@click.option("--user", default="root", show_default=True, help="root, alice, bob.")
@click.option("--cwd", metavar="DIR", help="Default: the user's home.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Added to a clean environment.")
@click.argument("command", nargs=-1, required=True)
def execute(
    name: str, node: str | None, user: str, cwd: str | None, env: tuple[str, ...],
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a command inside."""
    requirements.require_root()
    environ = dict(pair.partition("=")[::2] for pair in env)
    argv = Lab.attach(name).argv(command, user=user, node=node, env=environ, cwd=cwd)
    sys.stdout.flush()
    os.execv(argv[0], argv)


@commands.command()
@click.option("--runs", default=20, show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of the first run; each has the next.")
@click.option("--labs", default=1, show_default=True, help="Side by side.")
@click.option("--minutes", default=math.inf, help="Begin no run after so many.")
@click.option(
    "--evidence",
    type=_DIRECTORY,
    default=Path("/var/tmp/slurm-health-chaos"),
    show_default=True,
    help="Where the files of violations go.",
)
def chaos(runs: int, seed: int, labs: int, evidence: Path, minutes: float) -> int:
    """Cause random trouble for real jobs, each on a cluster of its own."""
    requirements.require(None)
    from .chaos import command  # it loads slurm-health, which the other commands do without

    try:
        well = command.run_many(
            range(seed, seed + runs), labs=labs, evidence=evidence, minutes=minutes
        )
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr, flush=True)
        # Threads wait for Slurm, for minutes perhaps. Their labs end with this process.
        os._exit(_INTERRUPTED)
    return 0 if well else 1


@commands.command()
def install() -> None:
    """Install the distribution's packages."""
    installing.install()


@commands.command()
@click.argument("version", type=click.Choice(sorted(installing.SUITES)))
@click.argument("root", metavar="DIR", type=_DIRECTORY, required=False)
def make_root(version: str, root: Path | None) -> None:
    """Install another Slurm release."""
    root = root or installing.ROOTS / version
    installing.make_root(version, root)
    print(f"Slurm {version} is in {root} (python -m tests.lab up --release {root})")


@commands.group()
def fault() -> None:
    """Break a node, or mend it."""


def _add_fault(method: str, text: str, parameters: list[inspect.Parameter]) -> None:
    """Add a command for a method of `Faults` that breaks or mends one node."""

    def run(name: str, **given: Any) -> None:
        requirements.require_root()
        getattr(Lab.attach(name).fault, method)(**given)

    parsed: list[click.Parameter] = [click.Option(["--name"], default="lab", show_default=True)]
    for parameter in parameters:
        default = parameter.default
        if default is inspect.Parameter.empty:
            parsed.append(click.Argument([parameter.name], type=parameter.annotation))
        elif parameter.name == "device":
            parsed.append(click.Argument(["device"], metavar="GPU", type=int, default=default))
        else:
            option = [f"--{parameter.name.replace('_', '-')}"]
            kind = parameter.annotation if parameter.annotation in (bool, float, int) else int
            parsed.append(click.Option(option, type=kind, default=default, is_flag=kind is bool))
    words = method.replace("_", "-")
    fault.add_command(click.Command(words, params=parsed, callback=run, help=text))


for _name, _method in inspect.getmembers(Faults, inspect.isfunction):
    _signature = inspect.signature(_method)
    _, *_parameters = _signature.parameters.values()
    _takes = [parameter.name for parameter in _parameters]
    _changes_a_node = _takes[:1] == ["node"] and _signature.return_annotation is None
    if _changes_a_node and "faults" not in _takes and not _name.startswith("_"):
        _add_fault(_name, inspect.cleandoc(_method.__doc__ or "").split("\n")[0], _parameters)
