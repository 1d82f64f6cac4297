# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, build, call, exit. Every error becomes one line and a code here.

Heavy modules are loaded inside the commands that need them.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_health import __version__
from slurm_health.agent.agent import Agent, AgentSettings, JournalNotVisible
from slurm_health.errors import ExitCode, SlurmHealthError

_F = TypeVar("_F", bound=Callable[..., Any])


def journal_option(command: _F) -> _F:
    """Add `--journal` to a command."""
    return click.option(
        "--journal",
        metavar="DIR",
        help="Where journals are kept [default: SLURM_HEALTH_JOURNAL, else the site's choice,"
        " else ~/.slurm-health/journal].",
    )(command)


# Commands that live in modules of their own, loaded when they are called or described.
_ELSEWHERE = {
    "doctor": "slurm_health.cli.doctor:doctor",
    "epilog": "slurm_health.cli.hooks:epilog",
    "healthcheck": "slurm_health.cli.hooks:healthcheck",
    "init-config": "slurm_health.cli.hooks:init_config",
    "nodes": "slurm_health.cli.hooks:nodes",
    "plan": "slurm_health.cli.plan:plan",
    "prolog": "slurm_health.cli.hooks:prolog",
    "run": "slurm_health.cli.run:run",
}


class Commands(click.Group):
    """Loads a command's module only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None where there is none of that name."""
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, name = _ELSEWHERE[cmd_name].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command a line begins with; where there is none, name the nearest.

        Raises:
            UsageError: there is no such command.
        """
        name = args[0]
        near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        if near and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="slurm-health", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what is being waited for.")
def commands(verbose: bool) -> None:
    """Find the bad node of a training job before the job starts, and run without it.

    Exit codes: 0 healthy, 1 bad nodes found, 2 usage, 3 inconclusive, 4 Slurm or the shared
    filesystem unavailable, 70 internal error. A job submitted with sbatch ends with the code of
    its own script.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="slurm-health: %(message)s",
    )
    logging.getLogger("filelock").setLevel(logging.WARNING)


@commands.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    short_help="Submit a batch job that is checked first; a drop-in for sbatch.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sbatch(arguments: tuple[str, ...]) -> int:
    """Submit a batch job that is checked first; a drop-in for sbatch."""
    from slurm_health.sbatch.submit import submit

    return submit(
        list(arguments),
        environ=dict(os.environ),
        stdin=sys.stdin.buffer,
        python=sys.executable,
    )


@commands.command(short_help="Check the nodes of this allocation, or this machine.")
@journal_option
@click.option(
    "--local",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Check this machine, without Slurm, with N processes that play nodes.",
)
@click.option(
    "--python",
    metavar="PATH",
    help="The interpreter that runs the probes: the one the job trains with [default: python3 on"
    " PATH if it has torch, else slurm-health's own].",
)
@click.option(
    "--check",
    "what",
    metavar="WHAT[,WHAT...]",
    help="What to measure: quick, standard or thorough; probes by name; a program of your own by"
    " its path [default: standard].",
)
@click.option(
    "--network-check",
    is_flag=True,
    help="Measure the network in pairs of nodes; alone or beside --check.",
)
@click.option(
    "--straggler-detection",
    is_flag=True,
    help="Train a GPT of the size that fits, in pairs of nodes; alone or beside --check.",
)
@click.option(
    "--workers-per-node",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="How many processes measure a node that has no accelerators.",
)
@click.option(
    "--act",
    is_flag=True,
    help="Drain faulty nodes (with the rights to) and requeue the job without its bad nodes.",
)
@click.option(
    "--on-straggler",
    type=click.Choice(["exclude", "report", "requeue", "drain"]),
    default="exclude",
    show_default=True,
    help="With --act: leave a slow node out of the job, only report it, leave it out but never at"
    " the price of a smaller job, or leave it out and drain it too.",
)
@click.option(
    "--on-inconclusive",
    type=click.Choice(["proceed", "hold", "requeue"]),
    default="proceed",
    show_default=True,
    help="With --act: run on nodes that could not be decided, hold the job for a person to look at"
    " them, or leave them out like bad ones.",
)
@click.option(
    "--max-requeues",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    metavar="N",
    help="With --act: how often the job may be requeued away from bad nodes.",
)
@click.option(
    "--at-requeue-limit",
    type=click.Choice(["start", "hold", "stop"]),
    default="stop",
    show_default=True,
    help="With --act: what a job does on bad nodes once it was requeued that often.",
)
@click.option(
    "--round-deadline",
    type=click.FloatRange(1.0, 3600.0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a round may take before anything is known of how long it should take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--nodes-wanted",
    type=click.IntRange(1),
    metavar="N",
    help="With --act: go on with this many of the allocation's nodes and give the others back.",
)
@click.option(
    "--nodes-needed",
    type=click.IntRange(1),
    metavar="N",
    help="With --act and --nodes-wanted: go on with so few rather than be requeued.",
)
@click.option("--script-name", default="", hidden=True)
@click.option("--for-supervisor", is_flag=True, hidden=True)
def check(**options: Any) -> int:
    """Check the nodes of this allocation (salloc, or a line in a batch script).

    Every node is measured alone, then exchanges data with changing partners, round by round,
    until each node is decided. Prints a table; exits 0 when all nodes are healthy, 1 when bad
    ones were found, 3 when some could not be decided. With --act it exits 0 whenever the script
    may go on.
    """
    from slurm_health.cli.check import run_check

    return run_check(options, dict(os.environ))


@commands.command()
@click.argument("job", metavar="JOBID")
@journal_option
@click.option("--cluster", metavar="NAME", help="The cluster, where several share the journal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--raw", is_flag=True, help="With --json: include every raw sample.")
def report(job: str, journal: str | None, cluster: str | None, as_json: bool, raw: bool) -> int:
    """Print what was measured, concluded and done for a job.

    JOBID is a job id, or 12_3 for a task of an array. Reads the journal's files alone: any time
    later, on any machine that sees them.
    """
    from slurm_health import config
    from slurm_health.cli.terminal import print_result, terminal
    from slurm_health.report import export, find, table

    if raw and not as_json:
        raise click.UsageError("--raw goes with --json")
    root = config.journal_root(journal, os.environ)
    found = find.load(root, job, cluster=cluster, now_s=time.time())
    if as_json:
        print_result(export.as_json(found, raw=raw))
        return int(ExitCode.HEALTHY)
    width, unicode = terminal()
    print_result(table.job_text(found, width=width, unicode=unicode).rstrip("\n") + "\n")
    return int(ExitCode.HEALTHY)


@commands.command(hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--run-id", required=True)
@click.option("--launch", type=int, required=True)
@click.option("--python", required=True)
@click.option("--poll-s", type=float, required=True)
@click.option("--lifetime-s", type=float, required=True)
@click.option("--cpu-workers", type=int, default=1)
@click.option("--node", default=None)
def agent(node: str | None, **settings: Any) -> int:
    """Serve one node of a check. Started by the master."""
    return serve(node, settings, dict(os.environ))


@commands.command(hidden=True)
@click.option("--check", default=None)
@click.option("--journal", default=None)
@click.option("--python", default=None)
@click.option("--max-requeues", type=int, default=None)
@click.option("--on-straggler", default=None)
@click.option("--on-inconclusive", default=None)
@click.option("--at-requeue-limit", default=None)
@click.option("--nodes-wanted", type=int, default=None)
@click.option("--nodes-needed", type=int, default=None)
@click.option("--script-line", type=int, required=True)
@click.option("--script-name", required=True)
@click.option("--environ-fd", type=int, default=None)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def supervise(
    script_line: int,
    script_name: str,
    environ_fd: int | None,
    source: Path,
    arguments: tuple[str, ...],
    **settings: str | int | None,
) -> int:
    """Run the check, then the user's script. Started by the batch script of `sbatch`."""
    from slurm_health.processes import own_command
    from slurm_health.supervisor.supervisor import original_environ
    from slurm_health.supervisor.supervisor import supervise as run_supervisor

    check_argv = own_command(
        "check",
        "--act",
        "--for-supervisor",
        f"--script-name={script_name}",
        *(
            f"--{name.replace('_', '-')}={value}"
            for name, value in settings.items()
            if value is not None
        ),
    )
    return run_supervisor(
        script_source=source,
        script_line=script_line,
        script_name=script_name,
        arguments=arguments,
        check_argv=check_argv,
        environ=original_environ(environ_fd),
    )


@commands.command("requeue-helper", hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--move", required=True)
def requeue_helper(directory: Path, move: str) -> int:
    """Release a requeued job without its bad nodes. Runs as a job of its own."""
    import msgspec

    from slurm_health.acting.release_elsewhere import release_elsewhere
    from slurm_health.acting.requeue_helper import Move
    from slurm_health.slurm.client import Client

    told = msgspec.json.decode(move, type=Move)
    released = release_elsewhere(told, directory=directory, client=Client(os.environ))
    return int(ExitCode.HEALTHY if released else ExitCode.UNAVAILABLE)


def main() -> None:
    """Run a command; turn every error into one line on stderr and an exit code."""
    try:
        result = commands.main(prog_name="slurm-health", standalone_mode=False)
    except SlurmHealthError as err:
        click.echo(f"slurm-health: {err}", err=True)
        sys.exit(int(err.exit_code))
    except click.ClickException as err:
        if not sys.argv[1:]:
            err.show()  # the help, which nobody asked for by name
            sys.exit(int(ExitCode.USAGE))
        click.echo(f"slurm-health: {err.format_message()}{_where_to_look(err)}", err=True)
        sys.exit(int(ExitCode.USAGE))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception:
        # Python's own code for this is 1, which here says that a node is bad.
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    sys.exit(int(result) if isinstance(result, int) else 0)


def _where_to_look(err: click.ClickException) -> str:
    if isinstance(err, click.UsageError) and err.ctx is not None:
        return f" (see {err.ctx.command_path} --help)"
    return ""


def serve(node: str | None, settings: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run the agent of this node; say on standard error, for the launcher, why it cannot."""
    name = node or environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        Agent(AgentSettings(node=name, **settings), environ).run()
    except JournalNotVisible as err:
        return _cannot(name, f"does not see the master's journal {err}")
    except SlurmHealthError as err:
        return _cannot(name, str(err))
    return int(ExitCode.HEALTHY)


def _cannot(node: str, why: str) -> int:
    print(f"slurm-health agent: {node}: {why}", file=sys.stderr, flush=True)
    return int(ExitCode.UNAVAILABLE)
