# SPDX-License-Identifier: Apache-2.0
"""The commands that only slurm-health itself calls: a check's and a job's processes begin here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ConfigError, ExitCode, JournalError, SlurmHealthError
from slurm_health.system.signals import leaving_on

if TYPE_CHECKING:
    from slurm_health.preflight.by_default.at_start import Choice
    from slurm_health.preflight.job_spec import JobSpec


@click.command(hidden=True)
@click.option("--spec", metavar="JSON", default="{}")
@click.option("--script-line", type=int, required=True)
@click.option("--script-name", required=True)
@click.option("--environ-fd", type=int)
@click.option("--by-default", metavar="RULES")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def supervise(
    spec: str,
    script_line: int,
    script_name: str,
    environ_fd: int | None,
    by_default: str | None,
    words: tuple[str, ...],
) -> int:
    """Run the check, then the user's script. Started by the batch script of `sbatch`.

    WORDS are the batch script and its arguments.
    """
    from slurm_health.preflight.decide.policy import OnHang
    from slurm_health.preflight.job_spec import JobSpec
    from slurm_health.preflight.supervisor import supervisor
    from slurm_health.system.processes import own_command

    source, *arguments = words
    environ = supervisor.original_environ(environ_fd)
    asked, limit_s, checked, quiet = from_json(spec, JobSpec), math.inf, True, False
    if by_default is not None:
        choice = _by_default(by_default, supervisor.unpacked(Path(source), script_line), environ)
        checked, limit_s, quiet = choice.spec is not None, choice.limit_s, choice.quiet
        asked = choice.spec or JobSpec(monitor=OnHang.OFF)
    asked = msgspec.structs.replace(asked, script=script_name)
    # One name for the run, at however many starts of its check.
    own_words = ("supervised-check", os.urandom(4).hex(), asked.encoded())
    check_argv = own_command(*(("--verbose",) if asked.verbose else ()), *own_words)
    return supervisor.supervise(
        supervisor.SupervisorConfig(
            source=Path(source),
            line=script_line,
            arguments=arguments,
            check_argv=check_argv,
            restart_argv=check_argv,
            environ=environ,
            spec=asked,
            checked=checked,
            limit_s=limit_s,
            quiet=quiet,
        )
    )


def _by_default(rules: str, script: bytes, environ: Mapping[bytes, bytes]) -> Choice:
    """Decide about a job that its site may have checked.

    No user has asked for this: whatever fails in here, the job runs.
    """
    from slurm_health.preflight.by_default.at_start import Choice, choose
    from slurm_health.preflight.supervisor.recorder import log_lines

    try:
        choice = choose(rules, script, environ)
    except Exception as err:
        choice = Choice(spec=None, said=f"not checked: {type(err).__name__}: {err}")
    if choice.said:
        log_lines(f"by default: {choice.said}")
    return choice


@click.command("supervised-check", hidden=True)
@click.argument("run_id")
@click.argument("spec_json")
@click.option("--unchecked", metavar="REASON")
@click.option("--after-failure", metavar="JSON")
def supervised_check(
    run_id: str, spec_json: str, unchecked: str | None, after_failure: str | None
) -> int:
    """Check for the supervisor: that ends with an outcome, whatever stands in its way.

    What cannot be measured does not stop a job, unless its user wants that. With `--unchecked` the
    check has failed already, for that reason.
    """
    from slurm_health.cli.check import checked, settings_of
    from slurm_health.preflight import config
    from slurm_health.preflight.decide.unchecked import unchecked_by
    from slurm_health.preflight.job_spec import JobSpec
    from slurm_health.preflight.master.unchecked import conclude
    from slurm_health.preflight.supervisor.check_process import heartbeat, tell
    from slurm_health.records.records import Unchecked

    spec, environ, root, usable = from_json(spec_json, JobSpec), os.environ, None, True
    with leaving_on(signal.SIGTERM):  # ended from outside, the check still ends its agents
        if after_failure is not None:
            return _after_failure(after_failure, spec)
        try:
            if unchecked is None:
                alive, settings = heartbeat(), settings_of(spec, environ)
                settings = dataclasses.replace(
                    settings, act=True, run_id=run_id, tell=tell, alive=alive
                )
                return checked(None, settings, environ).finished.exit_code
            remedy = "the lines above say more; if not, report it as an error of slurm-health"
            why = Unchecked(reason=unchecked, remedy=remedy)
        except SlurmHealthError as err:
            why, usable = unchecked_by(err), not isinstance(err, JournalError)
        if usable:
            with contextlib.suppress(ConfigError):  # it may be what stands in the way
                root = config.journal_root(spec.journal, environ)
        on, script = spec.on_unchecked, spec.script
        return conclude(
            why, on, root=root, run_id=run_id, script=script, environ=environ, tell=tell
        ).exit_code


def _after_failure(failure: str, spec: JobSpec) -> int:
    """Decide for the supervisor what follows a failed script.

    If that cannot be decided the job ends as the script did: that is reported, nothing is done.
    """
    from slurm_health.cli.check import settings_of
    from slurm_health.preflight.decide.check_again import check_again
    from slurm_health.preflight.supervisor.check_process import heartbeat, tell
    from slurm_health.records.allocation import from_environ
    from slurm_health.records.records import Disposition, JobOutcome
    from slurm_health.training.restart import FailedScript, after_failure, check_took_s

    failed = from_json(failure, FailedScript, dec_hook=lambda kind, value: kind(value))
    alive = heartbeat()
    try:
        again = check_again(spec.check, check_took_s(failed.directory))
        settings = settings_of(msgspec.structs.replace(spec, check=again.check), os.environ)
        settings = dataclasses.replace(settings, act=True, tell=tell, alive=alive)
        allocation = from_environ(os.environ)
        return after_failure(
            failed, allocation, settings, os.environ, less_checked=again.less
        ).exit_code
    except SlurmHealthError as err:
        finished = JobOutcome(
            disposition=Disposition.STOP,
            exit_code=ExitCode.UNAVAILABLE,
            reason=f"what it needs is not known: {err}",
        )
        tell(finished, "")
        return finished.exit_code


@click.command("requeue-helper", hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--move", required=True)
def requeue_helper(directory: Path, move: str) -> int:
    """Release a requeued job without its bad nodes. Runs as a job of its own."""
    from slurm_health.preflight.acting.release_elsewhere import (
        Move,
        release_elsewhere,
        telling_owner,
    )
    from slurm_health.system.slurm.client import Client

    decoded = from_json(move, Move)
    client = Client(os.environ)
    here = os.environ.get("SLURMD_NODENAME", "")
    with telling_owner(decoded, os.environ):
        released = release_elsewhere(decoded, directory=directory, client=client, here=here)
    return int(ExitCode.HEALTHY if released else ExitCode.UNAVAILABLE)
