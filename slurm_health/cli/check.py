# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check`: for a person, for a script, and for the supervisor of a batch job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click
from msgspec import structs

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
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition
from slurm_health.system import journal
from slurm_health.system.signals import leaving_on


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
        given = {k: v for k, v in options.items() if v is not None and v is not False}
        with ProgressLine() as line:
            settings = settings_of(job_spec(given_in_environ(os.environ) | given), os.environ)
            settings = replace(settings, act=options["act"], progress=line.show)
            result = checked(options["local"], settings, os.environ)
        _print(result, as_json=options["as_json"])
        finished = result.finished
        goes_on = finished.disposition == Disposition.PROCEED
        # For a script: what was found or, once acted on, whether it may go on.
        if options["act"] and goes_on and finished.exit_code != ExitCode.UNAVAILABLE:
            return ExitCode.HEALTHY
        return finished.exit_code


def checked(
    local: int | None, settings: CheckSettings, environ: Mapping[str, str]
) -> FinishedCheck:
    """Run the check of an allocation, or of this machine.

    Raises:
        SlurmHealthError: nothing can be checked, or the journal cannot be used.
    """
    allocation = None if local else from_environ(environ)
    settings.alive()
    journal.await_answer(settings.journal_root)
    settings.alive()
    if allocation is None:
        return check_local(local or 1, settings, environ, now_s=time.time())
    return check_allocation(allocation, settings, environ)


def settings_of(spec: JobSpec, environ: Mapping[str, str]) -> CheckSettings:
    """Return what a check is to do that was asked for.

    Raises:
        ConfigError: it cannot be had, or the site's file cannot be used.
    """
    probe_environ = environ_after(spec.setup, environ)
    spec = structs.replace(spec, paths=config.storage_paths(spec, environ))
    interpreter = find_interpreter(spec.python, probe_environ, light=why_light(spec.check))
    return CheckSettings(
        spec=spec,
        policy=spec.policy,
        journal_root=config.journal_root(spec.journal, environ),
        python=interpreter.python,
        light=interpreter.light,
        phases=chosen_phases(spec.check),
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
