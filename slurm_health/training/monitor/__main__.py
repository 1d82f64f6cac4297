# SPDX-License-Identifier: Apache-2.0
"""After a failure the supervisor starts this: `python -m slurm_health.training.monitor`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_health.records.allocation import from_environ
from slurm_health.records.errors import AllocationError
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor import post_mortem
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.output_files import script_text


def main() -> int:
    """Hold a post-mortem of the script that has just ended; 0 whatever was found."""
    parser = argparse.ArgumentParser(prog="slurm_health.training.monitor")
    parser.add_argument("--directory", default="")
    parser.add_argument("--exit-code", type=int, required=True)
    parser.add_argument("--signal", type=int, default=0)
    parser.add_argument("--told-to-end", action="store_true")
    parser.add_argument("--ended-s", type=float, default=time.time())
    parser.add_argument("--duration-s", type=float, required=True)
    parser.add_argument("--script-name", required=True)
    parser.add_argument("--script-source", type=Path)
    parser.add_argument("--output-from", default="")
    options = parser.parse_args()
    directory = Path(options.directory) if options.directory else None
    end = ScriptEnd(
        exit_code=options.exit_code,
        signal=options.signal,
        nodes=_nodes(os.environ),
        script=options.script_name,
        told_to_end=options.told_to_end,
        in_slurm="SLURM_JOB_ID" in os.environ,
        job=os.environ.get("SLURM_JOB_ID", ""),
    )
    job = EndedJob(
        end=end,
        environ=dict(os.environ),
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        directory=Path.cwd(),
        outputs=_outputs(),
        output_from=_begins(options.output_from),
        script_text=script_text(options.script_source),
        ended_s=options.ended_s,
        duration_s=options.duration_s,
        run_directory=directory,
    )
    post_mortem.hold(job, directory, clock=time.time)
    return 0


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return from_environ(environ).nodes
    except AllocationError:
        return ()


def _outputs() -> tuple[Path, ...]:
    """Return the files that are our standard output and error: Slurm opened them for the job."""
    links = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
    files = [link for link in links if link.is_absolute() and link.parts[1] != "dev"]
    return tuple(dict.fromkeys(files))


def _begins(text: str) -> dict[Path, int]:
    """Return where in the files of `_outputs` the output of this start of the script begins."""
    begins = [int(word) for word in text.split(",") if word]
    found: dict[Path, int] = {}
    for number, begin in zip((1, 2), begins, strict=False):
        path = Path(f"/proc/self/fd/{number}").readlink()
        found[path] = min(begin, found.get(path, begin))
    return found


if __name__ == "__main__":
    sys.exit(main())
