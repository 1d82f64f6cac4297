# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, call, exit. Every error becomes one line and a code here.

Each command has a module, which is loaded when the command is called or described.
"""

from __future__ import annotations

import importlib
import io
import logging
import sys
import traceback

import click

from slurm_health import __version__
from slurm_health.cli.options import Group
from slurm_health.records.errors import ExitCode, SlurmHealthError

# What each command does, for whom, so that the help of all loads none of them.
GROUPS = {
    "For your jobs": {
        "sbatch": "Submit a batch job that is checked first; a drop-in for sbatch.",
        "check": "Check the nodes of this allocation, or this machine.",
        "run": "torchrun that knows Slurm and can check the nodes first.",
        "plan": "Simulate a check, to see its rounds and its verdict.",
        "templates": "List and print batch scripts and other scripts to edit.",
    },
    "To see what happened": {
        "report": "Print what was measured, concluded and done for a job.",
        "history": "Print what all checks have found on a node.",
        "lemons": "List nodes that spoil one job after another.",
        "explain": "Explain a failed job from its files, or an error by its number.",
        "clean": "Remove old journals.",
    },
    "For administrators": {
        "doctor": "Say what to change in slurm.conf and on this machine.",
        "init": "Write the config file, the hooks, the check by default.",
        "healthcheck": "Run this node's checks and print what they find.",
        "nodes": "List the nodes slurm-health has drained; release them.",
        "sweep": "Check idle nodes, a few at a time.",
    },
}
_HIDDEN = ("requeue-helper", "supervise")
_NAMES = (*(name for group in GROUPS.values() for name in group), *_HIDDEN)
_MODULES = {
    "doctor": "site_setup",
    "healthcheck": "hooks",
    "init": "site_setup",
    "lemons": "history",
    "requeue-helper": "internal",
    "run": "drop_ins",
    "sbatch": "drop_ins",
    "supervise": "internal",
}


class Commands(Group):
    """All commands; a command's module is loaded only when it is needed."""

    def list_commands(self, _: click.Context) -> list[str]:
        """Return the names of all commands that users call."""
        return [name for name in _NAMES if name not in _HIDDEN]

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None if there is none of that name."""
        if cmd_name not in _NAMES:
            return None
        module = importlib.import_module(f"slurm_health.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that a line begins with, also one that only slurm-health calls."""
        if args[0] in _HIDDEN:
            return args[0], self.get_command(ctx, args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does, without loading any."""
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(group.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="slurm-health", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Also log what the command is waiting for.")
def commands(verbose: bool) -> None:
    """Find the bad node of a training job before the job starts, and run without it.

    \b
    slurm-health sbatch train.sh    submit a job whose nodes are checked first
    slurm-health report JOBID       see what became of it

    Exit codes: 0 healthy, 1 bad nodes found, 2 usage, 3 inconclusive, 4 Slurm or the shared
    filesystem unavailable, 70 internal error. A job submitted with sbatch ends with the code of
    its own script.
    """  # noqa: D301 - click reads the backslash
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="slurm-health: %(message)s",
    )
    logging.getLogger("filelock").setLevel(logging.WARNING)


def main() -> None:
    """Run a command; turn every error into one line on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name or a page may hold what the terminal's encoding does not have.
        sys.stdout.reconfigure(errors="replace")
    try:
        result = commands.main(prog_name="slurm-health", standalone_mode=False)
    except SlurmHealthError as err:
        click.echo(f"slurm-health: {err}", err=True)
        sys.exit(int(err.exit_code))
    except click.ClickException as err:
        ctx = err.ctx if isinstance(err, click.UsageError) else None
        if ctx is not None and err.message == ctx.get_help():
            err.show()  # the help, though it was not asked for: there was no word
        else:
            path = ctx.command_path if ctx is not None else f"slurm-health {_called()[0]}".strip()
            see = f" (see {path} --help)" if isinstance(err, click.UsageError) else ""
            click.echo(f"slurm-health: {_problem(err)}{see}", err=True)
        sys.exit(int(ExitCode.USAGE))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception:
        # Python's own code for this is 1, which here says that a node is bad.
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    sys.exit(int(result) if isinstance(result, int) else 0)


def _problem(err: click.ClickException) -> str:
    """Return what is wrong with a line, and what would be right."""
    match err:
        case click.NoSuchOption(ctx=click.Context() as ctx, option_name=name):
            outer = ctx.parent
            while outer is not None:
                if option := _option(outer.command, name):
                    before = ctx.command_path.removeprefix(outer.command_path).strip()
                    usage = f"{outer.command_path} {_usage(option)} {before}"
                    return f"{name} goes before {before}: {usage}"
                outer = outer.parent
            called, command = _called()
            if ctx.parent is None and (option := _option(command, name)):
                return f"{name} goes after {called}: slurm-health {called} {_usage(option)}"
            near = f"; did you mean {err.possibilities[0]}?" if err.possibilities else ""
            return f"no option {name}{near}"
        case click.BadOptionUsage(option_name=name):
            option = _option(_called()[1], name)
            if option is not None and not option.is_flag:
                return f"{name} needs a value: {_usage(option)}. {option.help or ''}"
        case click.MissingParameter(param=click.Option() as option):
            return f"{option.opts[-1]} is missing: {_usage(option)}. {option.help}"
        case click.MissingParameter(param=click.Argument() as argument, ctx=click.Context() as ctx):
            return f"{argument.make_metavar(ctx)} is missing"
        case click.BadParameter(param=click.Option() as option):
            return f"{option.opts[-1]}: {err.message.rstrip('.')}"
    return err.format_message().rstrip(".").removeprefix("Got ")


def _usage(option: click.Option) -> str:
    return f"{option.opts[-1]} {option.metavar or ''}".rstrip()


def _option(command: click.Command | None, name: str) -> click.Option | None:
    """Return a command's option of this name, None if it has none."""
    for param in command.params if command else ():
        if isinstance(param, click.Option) and name in param.opts:
            return param
    return None


def _called() -> tuple[str, click.Command | None]:
    """Return the command that the line names, and its name."""
    name = next((word for word in sys.argv[1:] if word in _NAMES), "")
    return name, commands.get_command(click.Context(commands), name)
