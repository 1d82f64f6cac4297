# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real Slurm with one bad node, a training job that finds and leaves it, the report.

As root it starts the lab; without root it shows a check of this machine and says what it left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lab import Lab, LabError

EXAMPLES = Path(__file__).parents[1] / "examples"
BAD_NODE = "n3"
USER = "alice"
# It takes less than a minute on an idle machine with 2 cores; this is for a busy one.
DEADLINE_S = 240.0


def main() -> int:
    """Run the demonstration; return its exit code."""
    if os.geteuid() != 0:
        return _without_root()
    try:
        return _on_a_cluster()
    except LabError as err:
        print(f"demo: {err}", file=sys.stderr)
        return 4


def _on_a_cluster() -> int:
    bin_directory = Path(sys.executable).parent
    with Lab.start(nodes=6) as lab:
        _say(f"A real Slurm: slurmctld and 6 slurmd, {', '.join(lab.nodes)}, on this machine.")
        lab.fault.drop(BAD_NODE)
        _say(f"Packets between {BAD_NODE} and the other nodes are now dropped. Slurm sees nothing:")
        _show(lab, ["sinfo", "--format=%12N %6D %8T"])
        for name in ("train.sh", "train.py"):
            lab.run(["cp", str(EXAMPLES / name), "."], user=USER)
        environ = {"PATH": f"{bin_directory}:{os.defpath}"}
        answer = _show(
            lab, ["slurm-health", "sbatch", "-N", "5", "train.sh", "--epochs", "2"], environ
        )
        job_id = int(answer.split()[-1])
        _say(f"Job {job_id} is checked before it trains. Waiting for it to end ...")
        lab.wait_job(job_id, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}, DEADLINE_S)
        _show(lab, ["cat", f"slurm-{job_id}.out"])
        report = _show(lab, ["slurm-health", "report", str(job_id)], environ)
    found = any(line.split()[:2] == [BAD_NODE, "faulty"] for line in report.splitlines())
    _say("The lab is down again." if found else f"{BAD_NODE} was not found; this should not be.")
    return 0 if found else 1


def _without_root() -> int:
    _say(
        "Without root there is no lab: this shows a check of this machine, four processes playing"
        " nodes. Left out: Slurm, the fault, the requeue, the report of a job. As root, as"
        " with sudo make demo, it shows them too."
    )
    argv = [sys.executable, "-m", "slurm_health", "check", "--local", "4"]
    print("$ slurm-health check --local 4", flush=True)
    return subprocess.run(argv, check=False).returncode


def _show(lab: Lab, argv: list[str], environ: dict[str, str] | None = None) -> str:
    print(f"{USER}$ {' '.join(argv)}", flush=True)
    result = lab.run(argv, user=USER, env=environ or {}, check=False)
    print(result.stdout + result.stderr, flush=True)
    return result.stdout


def _say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
