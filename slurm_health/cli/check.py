# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check`: for a person, for a script, and for the supervisor of a batch job."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from slurm_health import config, probe_choice
from slurm_health.cli.shared_options import shared_options
from slurm_health.cli.terminal import ProgressLine, print_result, terminal
from slurm_health.core.acting.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.core.allocation import from_environ
from slurm_health.core.records import Disposition, RunFinished
from slurm_health.core.session.session import Limits
from slurm_health.errors import ExitCode, JournalError, SlurmHealthError
from slurm_health.killable import Hung, run_one
from slurm_health.master.run_check import (
    CheckSettings,
    FinishedCheck,
    check_allocation,
    check_local,
    find_python,
)
from slurm_health.master.setup_file import environ_after
from slurm_health.options import Door, localize_choices, what_to_check
from slurm_health.processes import leaving_on

# A server that fails over is back sooner.
_FILESYSTEM_LIMIT_S = 60.0


@click.command(short_help="Check the nodes of this allocation, or this machine.")
@click.option(
    "--local",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Check this machine, without Slurm, with N processes that play nodes.",
)
@shared_options(Door.CHECK)
@click.option(
    "--workers-per-node",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="How many processes measure a node that has no accelerators.",
)
@click.option(
    "--round-deadline",
    type=click.FloatRange(1.0, 3600.0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a round may take before anything is known of how long it should take.",
)
@click.option(
    "--act",
    is_flag=True,
    help="Drain faulty nodes (with the rights to) and requeue the job without its bad nodes.",
)
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
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--script-name", default="", hidden=True)
@click.option("--for-supervisor", metavar="RUN_ID", default="", hidden=True)
def check(**options: Any) -> int:
    """Check the nodes of this allocation (salloc, or a line in a batch script).

    Every node is measured alone, then exchanges data with changing partners, round by round,
    until each node is decided. Prints a table; exits 0 when all nodes are healthy, 1 when bad
    ones were found, 3 when some could not be decided. With --act it exits 0 whenever the script
    may go on.
    """
    if options["local"] and options["act"]:
        raise click.UsageError("--act needs a Slurm job; --local has none")
    with leaving_on(signal.SIGTERM):  # ended from outside, the check still ends its agents
        if options["for_supervisor"]:
            return _answer_supervisor(options, os.environ)
        result = _checked(options, os.environ)
        _print(result, as_json=options["as_json"])
        return _exit_code(result.finished, acted=options["act"])


def _answer_supervisor(options: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run the check for the supervisor: it ends with an answer, whatever stands in its way.

    What cannot be measured must not stop a job.
    """
    from slurm_health.supervisor.check_process import tell

    try:
        finished = _checked(options, environ, tell).finished
    except SlurmHealthError as err:
        finished = RunFinished(
            disposition=Disposition.PROCEED,
            exit_code=err.exit_code,
            reason=f"not checked: {err}",
        )
        tell(finished)
    return finished.exit_code


def _exit_code(finished: RunFinished, *, acted: bool) -> int:
    """Return the code for a script: what was found or, once acted on, whether it may go on."""
    goes_on = finished.disposition == Disposition.PROCEED
    if acted and goes_on and finished.exit_code != ExitCode.UNAVAILABLE:
        return ExitCode.HEALTHY
    return finished.exit_code


def _checked(
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    tell: Callable[..., None] = lambda *_: None,
) -> FinishedCheck:
    allocation = None if options["local"] else from_environ(environ)
    with _progress_line() as show:
        settings = _settings(options, environ, show, tell)
        _await_filesystem(settings.journal_root)
        if allocation is None:
            return check_local(options["local"], settings, environ, now_s=time.time())
        return check_allocation(allocation, settings, environ)


def _await_filesystem(root: Path) -> None:
    """Let a child ask the journal's filesystem first: whoever asks one that hangs waits for ever.

    Raises:
        JournalError: it did not answer.
    """

    def ask() -> bytes:
        os.statvfs(root)
        return b""

    if isinstance(run_one(ask, _FILESYSTEM_LIMIT_S), Hung):
        problem = f"its filesystem did not answer within {_FILESYSTEM_LIMIT_S:g} s"
        raise JournalError(root, problem)


def _settings(
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    show: Callable[[str], None] | None,
    tell: Callable[..., None],
) -> CheckSettings:
    """Return what a command line asks for.

    Raises:
        ConfigError: it cannot be had, or the site's file cannot be used.
    """
    by_name = {name.replace("_", "-"): value for name, value in options.items()}
    probe_environ = environ_after(options["setup"], environ)
    return CheckSettings(
        journal_root=config.journal_root(options["journal"], environ),
        python=find_python(options["python"], probe_environ),
        policy=Policy(
            max_requeues=options["max_requeues"],
            on_straggler=OnStraggler(options["on_straggler"]),
            on_inconclusive=OnInconclusive(options["on_inconclusive"]),
            at_requeue_limit=AtRequeueLimit(options["at_requeue_limit"]),
            nodes_wanted=options["nodes_wanted"],
            nodes_needed=options["nodes_needed"],
        ),
        limits=Limits(round_deadline_s=options["round_deadline"]),
        phases=probe_choice.chosen_phases(what_to_check(by_name)),
        localize=config.localize(environ) | localize_choices(options),
        cpu_workers=options["workers_per_node"],
        progress=show,
        act=options["act"],
        script=options["script_name"],
        tell=tell,
        run_id=options["for_supervisor"],
        setup=options["setup"] or "",
        probe_environ=probe_environ,
    )


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[str], None] | None]:
    """Provide what shows, in one line, what is going on; None where nobody is at a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    line = ProgressLine(sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
    try:
        yield line.show
    finally:
        line.erase()


def _print(result: FinishedCheck, *, as_json: bool) -> None:
    from slurm_health.report import export, find, table
    from slurm_health.report.build import run_report

    run = run_report(find.read_run(result.directory))
    if as_json:
        print_result(export.run_as_json(run))
        return
    width, unicode = terminal()
    print_result(table.check_summary(run, width=width, unicode=unicode).rstrip("\n") + "\n")
