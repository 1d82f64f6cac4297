# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check`: for a person, for a script, and for the supervisor of a batch job."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import click

from slurm_health import config, probe_choice
from slurm_health.cli.terminal import ProgressLine, print_result, terminal
from slurm_health.core import probe_catalog
from slurm_health.core.acting.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.core.allocation import from_environ
from slurm_health.core.records import Disposition, RunFinished
from slurm_health.core.session.session import Limits
from slurm_health.errors import ExitCode, SlurmHealthError
from slurm_health.master.run_check import (
    CheckResult,
    CheckSettings,
    check_allocation,
    check_local,
    find_python,
)


def run_check(options: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run a check as the command line asks for it; return its exit code.

    Raises:
        SlurmHealthError: it cannot be run; for the supervisor this becomes a disposition instead,
            because what cannot be measured must not stop a job.
    """
    # Ended from outside, the check still ends its agents.
    signal.signal(signal.SIGTERM, _leave)
    if not options["for_supervisor"]:
        result = _checked(options, environ)
        _print(result, as_json=options["as_json"])
        return _exit_code(result.finished, acted=options["act"])
    try:
        result = _checked(options, environ)
    except SlurmHealthError as err:
        refused = RunFinished(
            disposition=Disposition.PROCEED,
            exit_code=err.exit_code,
            reason=f"not checked: {err}",
        )
        _tell_supervisor(refused, "")
        return int(err.exit_code)
    _tell_supervisor(result.finished, str(result.directory))
    return result.finished.exit_code


def _exit_code(finished: RunFinished, *, acted: bool) -> int:
    """Return the code for a script: what was found or, once acted on, whether it may go on."""
    goes_on = finished.disposition == Disposition.PROCEED
    if acted and goes_on and finished.exit_code != ExitCode.UNAVAILABLE:
        return ExitCode.HEALTHY
    return finished.exit_code


def _checked(options: Mapping[str, Any], environ: Mapping[str, str]) -> CheckResult:
    local = options["local"]
    if local and options["act"]:
        raise click.UsageError("--act needs a Slurm job; --local has none")
    allocation = None if local else from_environ(environ)
    line = _progress_line()
    settings = CheckSettings(
        journal_root=config.journal_root(options["journal"], environ),
        python=find_python(options["python"], environ),
        policy=Policy(
            max_requeues=options["max_requeues"],
            on_straggler=OnStraggler(options["on_straggler"]),
            on_inconclusive=OnInconclusive(options["on_inconclusive"]),
            at_requeue_limit=AtRequeueLimit(options["at_requeue_limit"]),
            nodes_wanted=options["nodes_wanted"],
            nodes_needed=options["nodes_needed"],
        ),
        limits=Limits(round_deadline_s=options["round_deadline"]),
        phases=probe_choice.chosen_phases(_what(options)),
        cpu_workers=options["workers_per_node"],
        progress=line.show if line is not None else None,
        act=options["act"],
        script=options["script_name"],
    )
    try:
        if allocation is None:
            return check_local(local, settings, environ, now_s=time.time())
        return check_allocation(allocation, settings, environ)
    finally:
        if line is not None:
            line.erase()


def _progress_line() -> ProgressLine | None:
    """Return the line that shows what is going on, None where nobody is at a terminal."""
    if not sys.stderr.isatty():
        return None
    line = ProgressLine(sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
    return line


def _what(options: Mapping[str, Any]) -> str:
    """Return what to check: what is named, what the flags stand for, or the default."""
    flags = [name for name in ("network-check", "straggler-detection") if options[_key(name)]]
    named = [options["what"]] if options["what"] else []
    return ",".join([*named, *flags]) or probe_catalog.DEFAULT


def _key(name: str) -> str:
    return name.replace("-", "_")


def _print(result: CheckResult, *, as_json: bool) -> None:
    from slurm_health.report import export, find, table
    from slurm_health.report.build import run_report

    run = run_report(find.read_run(result.directory))
    if as_json:
        print_result(export.run_as_json(run))
        return
    width, unicode = terminal()
    print_result(table.check_summary(run, width=width, unicode=unicode).rstrip("\n") + "\n")


def _tell_supervisor(finished: RunFinished, run_directory: str) -> None:
    line = {
        "disposition": finished.disposition,
        "exit_code": int(finished.exit_code),
        "reason": finished.reason,
        "run_directory": run_directory,
        "nodes": finished.nodes,
    }
    print(json.dumps(line), flush=True)


def _leave(signal_number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)
