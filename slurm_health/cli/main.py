# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, call, exit. Every error becomes one line and a code here.

Each command has a module, which is loaded when the command is called or described.
"""

from __future__ import annotations

import gc
import importlib
import io
import logging
import sys
import traceback

import click

from slurm_health import __version__
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
_HIDDEN = ("requeue-helper", "supervise", "supervised-check")
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
    "supervised-check": "internal",
}


class Commands(click.Group):
    """All commands; a command's module is loaded only when it is needed."""

    def list_commands(self, _: click.Context) -> list[str]:
        """Return the names of all commands that users call."""
        return [name for name in _NAMES if name not in _HIDDEN]

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None if there is none of that name."""
        if cmd_name not in _NAMES:
            return None
        gc.disable()  # it finds nothing in what is being loaded, and takes its time
        module = importlib.import_module(f"slurm_health.cli.{_MODULES.get(cmd_name, cmd_name)}")
        gc.enable()
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of a word; for a mistyped one the error has the nearest name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near:
                raise click.UsageError(
                    f"No such command '{args[0]}'; did you mean {near[0]}?", ctx
                ) from err
            raise

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
            path = ctx.command_path if ctx is not None else "slurm-health"
            see = f" (see {path} --help)" if isinstance(err, click.UsageError) else ""
            text = err.format_message().rstrip(".")
            if isinstance(err, click.NoSuchOption) and err.possibilities:
                near = " or ".join(sorted(err.possibilities))
                text = f"No such option '{err.option_name}'; did you mean {near}?"
            click.echo(f"slurm-health: {text}{see}", err=True)
        sys.exit(int(ExitCode.USAGE))
    except (click.Abort, KeyboardInterrupt):
        click.echo("slurm-health: interrupted", err=True)
        sys.exit(130)
    except Exception:
        # Python's own code for this is 1, which here says that a node is bad.
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    sys.exit(int(result) if isinstance(result, int) else 0)
