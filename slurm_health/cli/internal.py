# SPDX-License-Identifier: Apache-2.0
"""The commands that only slurm-health itself calls: a check's and a job's processes begin here."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode, SlurmHealthError


@click.command(hidden=True)
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--run-id", required=True)
@click.option("--launch", type=int, required=True)
@click.option("--python", required=True)
@click.option("--poll-s", type=float, required=True)
@click.option("--silence-s", type=float, required=True)
@click.option("--cpu-workers", type=int, default=1)
@click.option("--gpus", type=int, default=0)
@click.option("--node", default=None)
def agent(node: str | None, **settings: Any) -> int:
    """Serve one node of a check. Started by the master, which hears on stderr why it cannot."""
    from slurm_health.preflight.agent.agent import Agent, AgentSettings
    from slurm_health.preflight.agent.lookout import JournalNotVisible
    from slurm_health.preflight.supervisor.script_process import FOR_SCRIPT

    for number in FOR_SCRIPT:  # `sbatch --signal` sends them to every step
        signal.signal(number, signal.SIG_IGN)
    name = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        Agent(AgentSettings(node=name, **settings), dict(os.environ)).run()
    except JournalNotVisible as err:
        return _cannot(name, f"does not see the master's journal {err}")
    except SlurmHealthError as err:
        return _cannot(name, str(err))
    return int(ExitCode.HEALTHY)


def _cannot(node: str, why: str) -> int:
    print(f"slurm-health agent: {node}: {why}", file=sys.stderr, flush=True)
    return int(ExitCode.UNAVAILABLE)


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--script-line", type=int, required=True)
@click.option("--script-name", required=True)
@click.option("--environ-fd", type=int)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def supervise(
    script_line: int, script_name: str, environ_fd: int | None, words: tuple[str, ...]
) -> int:
    """Run the check, then the user's script. Started by the batch script of `sbatch`.

    WORDS are options of the check, as `--name=value`, then the batch script and its arguments.
    """
    from slurm_health.preflight.decide.policy import FlightRecorder, Monitor
    from slurm_health.preflight.supervisor import supervisor
    from slurm_health.preflight.supervisor.script_runs import Restarts
    from slurm_health.system.processes import own_command

    options = list(itertools.takewhile(lambda word: word.startswith("--"), words))
    source, *arguments = words[len(options) :]
    options, max_restarts = _without("--max-restarts", options)
    options, monitor = _without("--monitor", options)
    options, flight_recorder = _without("--flight-recorder", options)
    # One name for the run, at however many starts of its check.
    own_words = ("--act", "--for-supervisor", os.urandom(4).hex(), f"--script-name={script_name}")
    check_argv = own_command("check", *own_words, *options)
    told = supervisor.Supervised(
        source=Path(source),
        line=script_line,
        name=script_name,
        arguments=arguments,
        check_argv=check_argv,
        # Without the options that it does not need: one of them may be why there was no check.
        record_argv=own_command("check", *own_words, *filter(_is_for_record, options)),
        environ=supervisor.original_environ(environ_fd),
        restarts=Restarts(
            most=int(max_restarts or 0),
            argv=check_argv,
            survives="--keep-spares=yes" in options,
        ),
        monitor=monitor or Monitor.REPORT.value,
        flight_recorder=flight_recorder == FlightRecorder.ON.value,
        unchecked_runs=not {"--on-unchecked=stop", "--on-unchecked=hold"} & set(options),
    )
    return supervisor.supervise(told)


def _without(name: str, options: list[str]) -> tuple[list[str], str]:
    """Return the options without one that the check does not take, and its value."""
    own = [word for word in options if word.startswith(f"{name}=")]
    return [word for word in options if word not in own], "".join(own[-1:]).partition("=")[2]


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
