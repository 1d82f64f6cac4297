# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, call, exit. Every error becomes one line and a code here.

Each command has a module, which is loaded when the command is called or described.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import sys
import traceback

import click

from slurm_health import __version__
from slurm_health.records.errors import ExitCode, SlurmHealthError

_COMMANDS = {
    "check": "check:check",
    "clean": "clean:clean",
    "doctor": "site_setup:doctor",
    "explain": "explain:explain",
    "healthcheck": "hooks:healthcheck",
    "history": "history:history",
    "init": "site_setup:init",
    "lemons": "history:lemons",
    "nodes": "nodes:nodes",
    "plan": "plan:plan",
    "report": "report:report",
    "requeue-helper": "internal:requeue_helper",
    "run": "drop_ins:run",
    "sbatch": "drop_ins:sbatch",
    "supervise": "internal:supervise",
    "sweep": "sweep:sweep",
    "templates": "shipped:templates",
}
# What each does, for whom, so that the help of all loads none of them.
GROUPS = {
    "For a job": {
        "sbatch": "Submit a batch job that is checked first; a drop-in for sbatch.",
        "check": "Check the nodes of this allocation, or this machine.",
        "run": "torchrun that knows Slurm and can check the nodes first.",
        "templates": "List, show and copy batch scripts and other scripts to edit.",
    },
    "To look at what happened": {
        "report": "Print what was measured, concluded and done for a job.",
        "history": "Print what all checks have found on a node.",
        "lemons": "List nodes that spoil one job after another.",
        "explain": "Explain a failed job from its files, or an error by its number.",
        "clean": "Remove old journals.",
    },
    "For administrators": {
        "doctor": "Say what to change in this site's slurm.conf and on this machine.",
        "init": "Draft the config file; write the hooks, and the check by default.",
        "healthcheck": "Run this node's checks and print what they find.",
        "nodes": "List the nodes slurm-health has drained; release them.",
        "sweep": "Check idle nodes, a few at a time.",
    },
    "Other commands": {
        "plan": "Show the rounds, the evidence and the verdict, without a cluster.",
    },
}
# As click puts it: `1<=x<=64`, or `x>=1`.
_IN_RANGE = re.compile(r"is not in the range (?:([\d.]+)(<=?))?x(?:([<>]=?)([\d.]+))?")
_BOUNDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}
_HIDDEN = ("requeue-helper", "supervise")
SHORT_HELP = {
    **dict.fromkeys(_HIDDEN, ""),
    **{name: text for group in GROUPS.values() for name, text in group.items()},
}


class Commands(click.Group):
    """Loads a command's module only when it is needed."""

    def list_commands(self, _: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(_COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None where there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(":")
        command = getattr(importlib.import_module(f"slurm_health.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does, without loading those of which that is known."""
        known = {name for group in GROUPS.values() for name in group}
        others = {
            name: self._short_help(ctx, name)
            for name in self.list_commands(ctx)
            if name not in known
        }
        for title, group in (*GROUPS.items(), ("Others", others)):
            rows = [row for row in group.items() if row[1]]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in SHORT_HELP:
            return SHORT_HELP[name]
        command = self.get_command(ctx, name)
        return "" if command is None or command.hidden else command.get_short_help_str(80)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command a line begins with; where there is none, name the nearest.

        Raises:
            UsageError: there is no such command.
        """
        name = args[0]
        if name not in _COMMANDS:
            import difflib  # not free, and few names are mistaken

            if near := difflib.get_close_matches(name, _COMMANDS, n=1):
                ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="slurm-health", message="%(prog)s %(version)s")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also print to stderr what the command is waiting for.",
)
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
        if not sys.argv[1:]:
            err.show()  # the help, though it was not asked for
            sys.exit(int(ExitCode.USAGE))
        click.echo(f"slurm-health: {_message(err)}{_where_to_look(err)}", err=True)
        sys.exit(int(ExitCode.USAGE))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception:
        # Python's own code for this is 1, which here says that a node is bad.
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    sys.exit(int(result) if isinstance(result, int) else 0)


def _message(err: click.ClickException) -> str:
    """Return what is wrong; of an option that lacks its value, what that would be."""
    said = _in_words(err.format_message())
    if isinstance(err, click.NoSuchOption) and err.ctx is not None:
        return _place_of(err.option_name, err.ctx) or said
    _, option = _of_named_command(getattr(err, "option_name", ""))
    if isinstance(err, click.BadOptionUsage) and option is not None and option.metavar:
        value = f"{err.option_name} {option.metavar}. {option.help or ''}"
        return f"{said.rstrip('.')}: {value}".rstrip()
    return said


def _of_named_command(option: str) -> tuple[str, click.Option | None]:
    """Return the command that the line names, and its option of this name, if it has one."""
    name = next((word for word in sys.argv[1:] if word in _COMMANDS), "")
    command = commands.get_command(click.Context(commands), name) if name else None
    for each in command.params if command else ():
        if isinstance(each, click.Option) and option in each.opts:
            return name, each
    return name, None


def _place_of(option: str, ctx: click.Context) -> str:
    """Say where an option goes that stands before its command, or behind it; else nothing."""
    outer = ctx.parent
    name, found = _of_named_command(option) if outer is None else ("", None)
    if found is not None:
        value = f"{option} {found.metavar or ''}".rstrip()
        return f"{option} goes after {name}: slurm-health {name} {value}"
    while outer is not None:
        for each in outer.command.params:
            if isinstance(each, click.Option) and option in each.opts:
                before = ctx.command_path.removeprefix(outer.command_path).strip()
                value = f"{option} {each.metavar or ''}".rstrip()
                return f"{option} goes before {before}: {outer.command_path} {value} {before}"
        outer = outer.parent
    return ""


def _in_words(said: str) -> str:
    """Say without a formula which numbers an option takes."""
    said = re.sub(r"is not a valid integer(?: range)?\.", "is not a whole number.", said)
    said = re.sub(r"is not a valid float(?: range)?\.", "is not a number.", said)
    return _IN_RANGE.sub(_range_in_words, said)


def _range_in_words(found: re.Match[str]) -> str:
    low, before, after, high = found.groups()
    told = [f"{_BOUNDS[before.replace('<', '>')]} {low}"] if low else []
    told += [f"{_BOUNDS[after]} {high}"] if high else []
    return f"must be {' and '.join(told)}"


def _where_to_look(err: click.ClickException) -> str:
    if isinstance(err, click.UsageError) and err.ctx is not None:
        return f" (see {err.ctx.command_path} --help)"
    return ""
