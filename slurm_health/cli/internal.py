# SPDX-License-Identifier: Apache-2.0
"""The commands that only slurm-health itself calls: a check's and a job's processes begin here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode

if TYPE_CHECKING:
    from slurm_health.preflight.by_default.at_start import Choice


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
    from slurm_health.preflight.decide.policy import FlightRecorder, Heartbeat, OnHang, OnUnchecked
    from slurm_health.preflight.job_spec import JobSpec
    from slurm_health.preflight.supervisor import supervisor
    from slurm_health.preflight.supervisor.script_runs import Restarts
    from slurm_health.system.processes import own_command

    source, *arguments = words
    environ = supervisor.original_environ(environ_fd)
    asked, limit_s, checked, quiet = from_json(spec, JobSpec), math.inf, True, False
    if by_default is not None:
        choice = _by_default(by_default, supervisor.unpacked(Path(source), script_line), environ)
        checked, limit_s, quiet = choice.spec is not None, choice.limit_s, choice.quiet
        asked = choice.spec or JobSpec(monitor=OnHang.OFF)
    asked = msgspec.structs.replace(asked, script=script_name)
    watched = asked.monitor is not OnHang.OFF
    # One name for the run, at however many starts of its check.
    own_words = ("--for-supervisor", os.urandom(4).hex(), f"--spec={asked.encoded()}")
    check_argv = own_command(*(("--verbose",) if asked.verbose else ()), "check", *own_words)
    return supervisor.supervise(
        supervisor.SupervisorConfig(
            source=Path(source),
            line=script_line,
            name=script_name,
            arguments=arguments,
            check_argv=check_argv,
            environ=environ,
            checked=checked,
            limit_s=limit_s,
            quiet=quiet,
            restarts=Restarts(
                most=asked.max_restarts, argv=check_argv, survives=asked.keeps_spares
            ),
            monitor=asked.monitor.value,
            heartbeat=watched and asked.heartbeat is Heartbeat.AUTO,
            flight_recorder=asked.flight_recorder is FlightRecorder.ON,
            unchecked_runs=asked.on_unchecked is OnUnchecked.PROCEED,
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


@click.command("requeue-helper", hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--move", required=True)
def requeue_helper(directory: Path, move: str) -> int:
    """Release a requeued job without its bad nodes. Runs as a job of its own."""
    from slurm_health.preflight.acting.release_elsewhere import release_elsewhere
    from slurm_health.preflight.acting.requeue_helper import Move
    from slurm_health.system.slurm.client import Client

    told = from_json(move, Move)
    client = Client(os.environ)
    released = release_elsewhere(
        told, directory=directory, client=client, here=os.environ.get("SLURMD_NODENAME", "")
    )
    return int(ExitCode.HEALTHY if released else ExitCode.UNAVAILABLE)
