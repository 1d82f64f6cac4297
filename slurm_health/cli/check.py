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
from dataclasses import replace
from typing import Any

import click

from slurm_health.cli.output import ProgressLine, page_here, print_result
from slurm_health.cli.shared_options import shared_options
from slurm_health.preflight import config, option_kinds
from slurm_health.preflight.decide.policy import (
    AtRequeueLimit,
    OnInconclusive,
    OnStraggler,
    OnUnchecked,
    Policy,
)
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.job_environment import environ_after, find_interpreter
from slurm_health.preflight.master.run_check import FinishedCheck, check_allocation, check_local
from slurm_health.preflight.options import Door, localize_choices, what_to_check
from slurm_health.preflight.session.deadlines import limits_of
from slurm_health.records.allocation import from_environ
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode, JournalError, SlurmHealthError
from slurm_health.records.records import Disposition, RunFinished, Unchecked
from slurm_health.system import journal
from slurm_health.system.signals import leaving_on


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
    "--act",
    is_flag=True,
    help="Drain faulty nodes (with rights to) and requeue the job without its bad nodes.",
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
    help="With --act and --nodes-wanted: go on with as few as this rather than be requeued.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--script-name", default="", hidden=True)
@click.option("--submit-time", type=int, metavar="SECONDS", hidden=True)
@click.option("--for-supervisor", metavar="RUN_ID", default="", hidden=True)
@click.option(
    "--on-unchecked",
    type=click.Choice([each.value for each in OnUnchecked]),
    default=OnUnchecked.PROCEED.value,
    hidden=True,
)
@click.option("--unchecked", metavar="REASON", hidden=True)
@click.option("--keep-spares", type=bool, default=False, hidden=True)
@click.option("--after-failure", metavar="JSON", default="", hidden=True)
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

    What cannot be measured does not stop a job, unless its user wants that. With `--unchecked` the
    check has failed already, for that reason.
    """
    from slurm_health.preflight.supervisor.check_process import heartbeat, tell

    if options["unchecked"] is not None:
        return _unchecked(_died(options["unchecked"]), options, environ, tell)
    if options["after_failure"]:
        return _after_failure(options, environ, tell, heartbeat())
    try:
        return _checked(options, environ, tell, heartbeat()).finished.exit_code
    except SlurmHealthError as err:
        from slurm_health.preflight.decide.unchecked import unchecked_by

        journal_fails = isinstance(err, JournalError)
        return _unchecked(unchecked_by(err), options, environ, tell, journal_fails=journal_fails)


def _after_failure(
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    tell: Callable[..., None],
    alive: Callable[[], None],
) -> int:
    """Decide for the supervisor what follows a failed script.

    Where that cannot be decided the job ends as the script did: it says so, and does nothing.
    """
    from slurm_health.preflight.decide.check_again import check_again
    from slurm_health.training.restart import FailedScript, after_failure, check_took_s

    failed = from_json(options["after_failure"], FailedScript, dec_hook=_path)
    flags = ("network_check", "straggler_detection")
    asked = None
    if any(options[name] for name in ("check", *flags)):
        asked = what_to_check({name.replace("_", "-"): value for name, value in options.items()})
    try:
        again = check_again(asked, check_took_s(failed.directory))
        given = {**options, **dict.fromkeys(flags, False), "check": again.check}
        settings = replace(_settings(given, environ, None), tell=tell, alive=alive)
        allocation = from_environ(environ)
        finished = after_failure(failed, allocation, settings, environ, less_checked=again.less)
    except SlurmHealthError as err:
        finished = RunFinished(
            disposition=Disposition.STOP,
            exit_code=ExitCode.UNAVAILABLE,
            reason=f"what it needs is not known: {err}",
        )
        tell(finished)
    return finished.exit_code


def _path(kind: type, value: object) -> object:
    return kind(value)


def _died(how: str) -> Unchecked:
    remedy = "the lines above say more; if they do not help, report it as an error of slurm-health"
    return Unchecked(reason=how, remedy=remedy)


def _unchecked(
    found: Unchecked,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    tell: Callable[..., None],
    *,
    journal_fails: bool = False,
) -> int:
    """End a check that could not measure."""
    from slurm_health.preflight.master import unchecked

    root = None
    if not journal_fails:
        with contextlib.suppress(ConfigError):  # it may be what stands in the way
            root = config.journal_root(options["journal"], environ)
    finished = unchecked.conclude(
        found,
        OnUnchecked(options["on_unchecked"]),
        root=root,
        run_id=options["for_supervisor"],
        script=options["script_name"],
        environ=environ,
        tell=tell,
    )
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
    alive: Callable[[], None] = lambda: None,
) -> FinishedCheck:
    allocation = None if options["local"] else from_environ(environ)
    with _progress_line() as show:
        settings = replace(_settings(options, environ, show), tell=tell, alive=alive)
        alive()
        journal.await_answer(settings.journal_root)
        alive()
        if allocation is None:
            return check_local(options["local"], settings, environ, now_s=time.time())
        return check_allocation(allocation, settings, environ)


def _settings(
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    show: Callable[[str], None] | None,
) -> CheckSettings:
    """Return what a command line asks for.

    Raises:
        ConfigError: it cannot be had, or the site's file cannot be used.
    """
    by_name = {name.replace("_", "-"): value for name, value in options.items()}
    probe_environ = environ_after(options["setup"], environ)
    wanted = what_to_check(by_name)
    light = option_kinds.why_light(wanted)
    interpreter = find_interpreter(options["python"], probe_environ, light=light)
    return CheckSettings(
        journal_root=config.journal_root(options["journal"], environ),
        python=interpreter.python,
        light=interpreter.light,
        policy=Policy(
            max_requeues=options["max_requeues"],
            on_straggler=OnStraggler(options["on_straggler"]),
            on_inconclusive=OnInconclusive(options["on_inconclusive"]),
            at_requeue_limit=AtRequeueLimit(options["at_requeue_limit"]),
            nodes_wanted=options["nodes_wanted"],
            nodes_needed=options["nodes_needed"],
            keep_spares=options["keep_spares"],
        ),
        limits=limits_of(options["round_deadline"]),
        phases=option_kinds.chosen_phases(wanted),
        localize=config.localize(environ) | localize_choices(options),
        cpu_workers=options["workers_per_node"],
        progress=show,
        act=options["act"],
        on_unchecked=OnUnchecked(options["on_unchecked"]),
        script=options["script_name"],
        submit_time_s=options["submit_time"],
        run_id=options["for_supervisor"],
        setup=options["setup"] or "",
        probe_environ=probe_environ,
    )


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[str], None] | None]:
    """Provide what shows, in one line, what is going on; None where there is no terminal."""
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
    from slurm_health.report import export, read, text
    from slurm_health.report.build import run_of

    run = run_of(read.read_run(result.directory))
    if as_json:
        print_result(export.as_json(export.check_document(run)) + "\n")
    else:
        print_result(text.check_text(run, page_here()) + "\n")
