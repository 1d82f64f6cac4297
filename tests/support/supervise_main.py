# SPDX-License-Identifier: Apache-2.0
"""Runs the supervisor as the batch script does, with the program in `--python` as the master."""

import argparse
import math
import sys
from pathlib import Path

from slurm_health.preflight.decide.policy import FlightRecorder, Heartbeat, OnHang, OnUnchecked
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.supervisor.supervisor import (
    SupervisorConfig,
    SupervisorPatience,
    original_environ,
    supervise,
)
from slurm_health.records.decoding import from_json

PATIENCE_S = {
    "grace_s": 5.0,
    "silence_s": 240.0,
    "requeue_wait_s": 90.0,
    "journal_wait_s": 10.0,
    "monitor_after_s": 30.0,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["supervise"])
    parser.add_argument("--spec", default="{}")
    parser.add_argument("--python")
    parser.add_argument("--script-line", type=int, required=True)
    parser.add_argument("--script-name", required=True)
    parser.add_argument("--environ-fd", type=int)
    for name, default in PATIENCE_S.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--monitor", default="off")
    parser.add_argument("--flight-recorder", action="store_true")
    parser.add_argument("--unchecked-stops", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("source", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.python = options.python or from_json(options.spec, JobSpec).python
    told = SupervisorConfig(
        source=options.source,
        line=options.script_line,
        arguments=options.arguments,
        check_argv=[options.python],
        restart_argv=[f"{options.python}-after"],
        environ=original_environ(options.environ_fd),
        spec=JobSpec(
            script=options.script_name,
            max_restarts=options.max_restarts,
            monitor=OnHang(options.monitor),
            heartbeat=Heartbeat.OFF,
            flight_recorder=FlightRecorder("on" if options.flight_recorder else "off"),
            on_unchecked=OnUnchecked("stop" if options.unchecked_stops else "proceed"),
        ),
        quiet=options.quiet,
        limit_s=options.limit_s,
    )
    patience = SupervisorPatience(**{name: getattr(options, name) for name in PATIENCE_S})
    return supervise(told, patience=patience)


if __name__ == "__main__":
    sys.exit(main())
