# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real Slurm with one bad node, a training job that finds and leaves it, the report.

As root it starts the lab; without root it shows a check of this machine and says what it left out.
`make demo GPUS=2` shows the same on nodes with played GPUs, one of which falls off its bus.
"""

from __future__ import annotations

import argparse
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
# Made by `make played-gpu`.
PLAYED = Path(__file__).parents[1] / ".venv-played"


def main() -> int:
    """Run the demonstration; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo")
    parser.add_argument("--gpus", type=int, default=0, help="played, of each node (default: none)")
    gpus: int = parser.parse_args().gpus
    if os.geteuid() != 0:
        return _without_root()
    try:
        return _on_gpus(gpus) if gpus else _on_a_cluster()
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
        found = _train(lab, 5, str(bin_directory))
    return _end(found=found)


def _on_gpus(gpus: int) -> int:
    python = PLAYED / "bin/python"
    # What the venv was made of may be in somebody's home.
    visible = (PLAYED, python.resolve().parents[1])
    with Lab.start(nodes=4, gpus=gpus, visible=visible) as lab:
        _say(f"A real Slurm: slurmctld and 4 slurmd with {gpus} played GPUs each, on this machine.")
        lab.fault.gpu_vanish(BAD_NODE, gpus - 1)
        _say(f"GPU {gpus - 1} of {BAD_NODE} has just fallen off the bus. Slurm sees nothing:")
        _show(lab, ["sinfo", "--format=%12N %6D %8T %8G"])
        bin_directories = f"{python.parent}:{Path(sys.executable).parent}"
        found = _train(lab, 3, bin_directories, f"--gres=gpu:{gpus}", f"--python={python}")
    return _end(found=found)


def _train(lab: Lab, nodes: int, bin_directories: str, *options: str) -> bool:
    """Show a training job and its report; tell whether that calls the bad node faulty."""
    for name in ("train.sh", "train.py"):
        lab.run(["cp", str(EXAMPLES / name), "."], user=USER)
    environ = {"PATH": f"{bin_directories}:{os.defpath}"}
    argv = ["slurm-health", "sbatch", "-N", str(nodes), *options, "train.sh", "--epochs", "2"]
    job_id = int(_show(lab, argv, environ).split()[-1])
    _say(f"Job {job_id} is checked before it trains. Waiting for it to end ...")
    lab.wait_job(job_id, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}, DEADLINE_S)
    _show(lab, ["cat", f"slurm-{job_id}.out"])
    report = _show(lab, ["slurm-health", "report", str(job_id)], environ)
    return any(line.split()[:2] == [BAD_NODE, "faulty"] for line in report.splitlines())


def _end(*, found: bool) -> int:
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
