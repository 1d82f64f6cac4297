# SPDX-License-Identifier: Apache-2.0
"""The commands that only slurm-health itself calls: a check's and a job's processes begin here."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode

if TYPE_CHECKING:
    from slurm_health.preflight.by_default.at_start import Choice

# Of a job's options, what is the supervisor's own.
_NOT_THE_CHECKS = (
    "--max-restarts",
    "--monitor",
    "--heartbeat",
    "--collect",
    "--flight-recorder",
    "--verbose",
)


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--script-line", type=int, required=True)
@click.option("--script-name", required=True)
@click.option("--environ-fd", type=int)
@click.option("--by-default", metavar="RULES")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def supervise(
    script_line: int,
    script_name: str,
    environ_fd: int | None,
    by_default: str | None,
    words: tuple[str, ...],
) -> int:
    """Run the check, then the user's script. Started by the batch script of `sbatch`.

    WORDS are options of the check, as `--name=value`, then the batch script and its arguments.
    """
    from slurm_health.preflight.decide.policy import FlightRecorder, Heartbeat, OnHang
    from slurm_health.preflight.supervisor import supervisor
    from slurm_health.preflight.supervisor.script_runs import Restarts
    from slurm_health.system.processes import own_command

    options = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    source, *arguments = words[len(options) :]
    environ = supervisor.original_environ(environ_fd)
    found = None
    if by_default is not None:
        found = _by_default(by_default, supervisor.unpacked(Path(source), script_line), environ)
        options = list(found.options or ("--monitor=off",))
    options, given = _apart(options)
    monitor = given["--monitor"] or OnHang.REPORT.value
    # Nobody has asked for a check by default, and nothing reads a heartbeat without a monitor.
    asked = by_default is None and monitor != OnHang.OFF.value
    heartbeat = given["--heartbeat"] or (Heartbeat.AUTO if asked else Heartbeat.OFF).value
    # One name for the run, at however many starts of its check.
    own_words = ("--act", "--for-supervisor", os.urandom(4).hex(), f"--script-name={script_name}")
    verbose = ("--verbose",) if given["--verbose"] else ()
    check_argv = own_command(*verbose, "check", *own_words, *options)
    told = supervisor.Supervised(
        source=Path(source),
        line=script_line,
        name=script_name,
        arguments=arguments,
        check_argv=check_argv,
        # Without the options that it does not need: one of them may be why there was no check.
        record_argv=own_command("check", *own_words, *filter(_is_for_record, options)),
        environ=environ,
        checked=found is None or found.options is not None,
        limit_s=found.limit_s if found else math.inf,
        quiet=by_default is not None and monitor == OnHang.OFF.value,
        restarts=Restarts(
            most=int(given["--max-restarts"] or 0),
            argv=check_argv,
            survives="--keep-spares=yes" in options,
        ),
        monitor=monitor,
        heartbeat=heartbeat == Heartbeat.AUTO.value,
        collect=given["--collect"],
        flight_recorder=given["--flight-recorder"] == FlightRecorder.ON.value,
        unchecked_runs=not {"--on-unchecked=stop", "--on-unchecked=hold"} & set(options),
    )
    return supervisor.supervise(told)


def _by_default(rules: str, script: bytes, environ: Mapping[bytes, bytes]) -> Choice:
    """Decide about a job that its site may have checked.

    No user has asked for this: whatever fails in here, the job runs.
    """
    from slurm_health.preflight.by_default.at_start import Choice, choose
    from slurm_health.preflight.supervisor.recorder import log_lines

    try:
        choice = choose(rules, script, environ)
    except Exception as err:
        choice = Choice(options=None, said=f"not checked: {type(err).__name__}: {err}")
    if choice.said:
        log_lines(f"by default: {choice.said}")
    return choice


def _apart(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the options that the check takes, and the last value of each that it does not."""
    given = dict.fromkeys(_NOT_THE_CHECKS, "")
    kept = []
    for word in options:
        name, equals, value = word.partition("=")
        if equals and name in given:
            given[name] = value
        else:
            kept.append(word)
    return kept, given


def _is_for_record(word: str) -> bool:
    return word.startswith(("--journal=", "--on-unchecked="))


@click.command("requeue-helper", hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--move", required=True)
def requeue_helper(directory: Path, move: str) -> int:
    """Release a requeued job without its bad nodes. Runs as a job of its own."""
    from slurm_health.preflight.acting.release_elsewhere import Here, release_elsewhere
    from slurm_health.preflight.acting.requeue_helper import Move
    from slurm_health.system.slurm.client import Client

    told = from_json(move, Move)
    job, node = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURMD_NODENAME", "")
    here = Here(int(job), node) if job.isdecimal() and node else None
    client = Client(os.environ)
    released = release_elsewhere(told, directory=directory, client=client, here=here)
    return int(ExitCode.HEALTHY if released else ExitCode.UNAVAILABLE)
