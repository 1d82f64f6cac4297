# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check`: for a person, for a script, and for the supervisor of a batch job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from slurm_health.cli.options import json_option, number_option
from slurm_health.cli.output import ProgressLine, page_here, print_result
from slurm_health.preflight import config
from slurm_health.preflight.chosen_probes import chosen_phases, why_light
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.job_environment import environ_after, find_interpreter
from slurm_health.preflight.master.run_check import FinishedCheck, check_allocation, check_local
from slurm_health.preflight.options import FOR_CHECK, given_in_environ, job_spec, with_options
from slurm_health.records.allocation import from_environ
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode, JournalError, SlurmHealthError
from slurm_health.records.records import Disposition, JobOutcome, Unchecked
from slurm_health.system import journal
from slurm_health.system.signals import leaving_on

_Tell = Callable[[JobOutcome, Path | str], None]


@click.command()
@with_options(*FOR_CHECK[:3])
@number_option(
    "--local", 1, 64, "Check this machine, without Slurm, with N processes that play nodes."
)
@json_option
@click.option(
    "--act",
    is_flag=True,
    help="Drain faulty nodes (with rights to) and requeue the job without its bad nodes.",
)
@with_options(*FOR_CHECK[3:])
@click.option("--spec", metavar="JSON", hidden=True)
@click.option("--for-supervisor", metavar="RUN_ID", default="", hidden=True)
@click.option("--unchecked", metavar="REASON", hidden=True)
@click.option("--after-failure", metavar="JSON", default="", hidden=True)
def check(**options: Any) -> int:
    """Check the nodes of this allocation (salloc, or a line in a batch script).

    Every node is measured alone, then exchanges data with changing partners, round by round,
    until each node is decided. Exits 0 if all nodes are healthy, 1 if some are bad, 3 if some
    could not be decided; with --act 0 if the script may go on. Options are read from variables,
    too, such as SLURM_HEALTH_CHECK.
    """
    if options["local"] and options["act"]:
        raise click.UsageError("--act needs a Slurm job; --local has none")
    with leaving_on(signal.SIGTERM):  # ended from outside, the check still ends its agents
        if options["for_supervisor"]:
            return _for_supervisor(options, os.environ)
        given = {k: v for k, v in options.items() if v is not None and v is not False}
        with ProgressLine() as line:
            settings = _settings(job_spec(given_in_environ(os.environ) | given), os.environ)
            settings = replace(settings, act=options["act"], progress=line.show)
            result = _checked(options["local"], settings, os.environ)
        _print(result, as_json=options["as_json"])
        finished = result.finished
        goes_on = finished.disposition == Disposition.PROCEED
        # For a script: what was found or, once acted on, whether it may go on.
        if options["act"] and goes_on and finished.exit_code != ExitCode.UNAVAILABLE:
            return ExitCode.HEALTHY
        return finished.exit_code


def _for_supervisor(options: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run the check for the supervisor: it ends with an outcome, whatever stands in its way.

    What cannot be measured does not stop a job, unless its user wants that. With `--unchecked` the
    check has failed already, for that reason.
    """
    from slurm_health.preflight.supervisor.check_process import heartbeat, tell

    spec, run_id = from_json(options["spec"], JobSpec), options["for_supervisor"]
    if options["unchecked"] is not None:
        remedy = "the lines above say more; if not, report it as an error of slurm-health"
        died = Unchecked(reason=options["unchecked"], remedy=remedy)
        return _unchecked(died, spec, run_id, environ, tell)
    alive = heartbeat()
    if options["after_failure"]:
        return _after_failure(options["after_failure"], spec, environ, tell, alive)
    try:
        settings = replace(
            _settings(spec, environ), act=True, run_id=run_id, tell=tell, alive=alive
        )
        return _checked(options["local"], settings, environ).finished.exit_code
    except SlurmHealthError as err:
        from slurm_health.preflight.decide.unchecked import unchecked_by

        journal_fails = isinstance(err, JournalError)
        return _unchecked(
            unchecked_by(err), spec, run_id, environ, tell, journal_fails=journal_fails
        )


def _after_failure(
    failure: str,
    spec: JobSpec,
    environ: Mapping[str, str],
    tell: _Tell,
    alive: Callable[[], None],
) -> int:
    """Decide for the supervisor what follows a failed script.

    If that cannot be decided the job ends as the script did: that is reported, nothing is done.
    """
    from slurm_health.preflight.decide.check_again import check_again
    from slurm_health.training.restart import FailedScript, after_failure, check_took_s

    failed = from_json(failure, FailedScript, dec_hook=lambda kind, value: kind(value))
    try:
        again = check_again(spec.check, check_took_s(failed.directory))
        settings = _settings(msgspec.structs.replace(spec, check=again.check), environ)
        settings = replace(settings, act=True, tell=tell, alive=alive)
        allocation = from_environ(environ)
        finished = after_failure(failed, allocation, settings, environ, less_checked=again.less)
    except SlurmHealthError as err:
        finished = JobOutcome(
            disposition=Disposition.STOP,
            exit_code=ExitCode.UNAVAILABLE,
            reason=f"what it needs is not known: {err}",
        )
        tell(finished, "")
    return finished.exit_code


def _unchecked(
    why: Unchecked,
    spec: JobSpec,
    run_id: str,
    environ: Mapping[str, str],
    tell: _Tell,
    *,
    journal_fails: bool = False,
) -> int:
    """End a check that could not measure."""
    from slurm_health.preflight.master import unchecked

    root = None
    if not journal_fails:
        with contextlib.suppress(ConfigError):  # it may be what stands in the way
            root = config.journal_root(spec.journal, environ)
    finished = unchecked.conclude(
        why,
        spec.on_unchecked,
        root=root,
        run_id=run_id,
        script=spec.script,
        environ=environ,
        tell=tell,
    )
    return finished.exit_code


def _checked(
    local: int | None, settings: CheckSettings, environ: Mapping[str, str]
) -> FinishedCheck:
    allocation = None if local else from_environ(environ)
    settings.alive()
    journal.await_answer(settings.journal_root)
    settings.alive()
    if allocation is None:
        return check_local(local or 1, settings, environ, now_s=time.time())
    return check_allocation(allocation, settings, environ)


def _settings(spec: JobSpec, environ: Mapping[str, str]) -> CheckSettings:
    """Return what a check is to do that was asked for.

    Raises:
        ConfigError: it cannot be had, or the site's file cannot be used.
    """
    probe_environ = environ_after(spec.setup, environ)
    interpreter = find_interpreter(spec.python, probe_environ, light=why_light(spec.check))
    return CheckSettings(
        spec=spec,
        policy=spec.policy,
        journal_root=config.journal_root(spec.journal, environ),
        python=interpreter.python,
        light=interpreter.light,
        phases=chosen_phases(spec.check, storage=config.storage_paths(spec, environ)),
        localize=config.localize(environ),
        probe_environ=probe_environ,
    )


def _print(result: FinishedCheck, *, as_json: bool) -> None:
    from slurm_health.report import export, read, text
    from slurm_health.report.build import run_of

    run = run_of(read.read_run(result.directory))
    if as_json:
        print_result(export.as_json(export.check_document(run)) + "\n")
    else:
        print_result(text.check_text(run, page_here()) + "\n")
