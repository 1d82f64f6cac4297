# SPDX-License-Identifier: Apache-2.0
"""After a failure the supervisor starts this: `python -m slurm_health.training.monitor`."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from pathlib import Path

from slurm_health.preflight.supervisor.post_mortem import EndedScript
from slurm_health.preflight.supervisor.recorder import log_lines
from slurm_health.records.allocation import from_environ
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import AllocationError
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor import post_mortem
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.output_files import script_text


def main() -> int:
    """Run a post-mortem of the script that has just ended; 0 for any conclusion."""
    script = from_json(sys.argv[1].encode(), EndedScript)
    number = os.WTERMSIG(script.status) if os.WIFSIGNALED(script.status) else 0
    try:
        nodes = from_environ(os.environ).nodes
    except AllocationError:
        nodes = ()
    # Our standard output and error are the job's files, opened by Slurm. If both are one file, the
    # output of this start of the script begins at the first of both places.
    outputs: dict[Path, int] = {}
    for stream, begin in zip((1, 2), script.output_from or (0, 0), strict=False):
        file = Path(f"/proc/self/fd/{stream}").readlink()
        if file.is_absolute() and file.parts[1] != "dev":
            outputs[file] = min(begin, outputs.get(file, begin))
    end = ScriptEnd(
        exit_code=128 + number if number else os.WEXITSTATUS(script.status),
        signal=number,
        nodes=nodes,
        script=script.name,
        told_to_end=script.told_to_end,
        in_slurm="SLURM_JOB_ID" in os.environ,
        job=os.environ.get("SLURM_JOB_ID", ""),
    )
    out = io.StringIO() if script.quiet else sys.stderr
    if script.quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    directory = Path(script.directory) if script.directory else None
    job = EndedJob(
        end=end,
        environ=dict(os.environ),
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        directory=Path.cwd(),
        outputs=tuple(outputs),
        output_from=outputs,
        script_text=script_text(Path(script.source)),
        ended_s=script.ended_s,
        duration_s=script.duration_s,
        run_directory=directory,
    )
    post_mortem.run_post_mortem(job, directory, clock=time.time, out=out)
    if isinstance(out, io.StringIO):
        log_lines(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
