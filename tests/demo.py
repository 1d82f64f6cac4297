# SPDX-License-Identifier: Apache-2.0
"""`make demo`: a real Slurm with one bad node, from the job that finds it to its return.

As root it starts the lab: a user's training job finds the node, leaves it and trains; root tests
the node with two partners and drains it; it is mended, and comes back. Without root it shows a
check of this machine and says what it left out. `make demo GPUS=2` shows the job on nodes with
played GPUs, one of which falls off its bus.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab import Lab, LabError

EXAMPLES = Path(__file__).parents[1] / "examples"
BAD_NODE = "n3"
USER, SWEEPER = "alice", "bob"
# It takes less than a minute and a half on an idle machine with 2 cores; this is for a busy one.
DEADLINE_S = 240.0
SITE = f"""\
[sweep]
user = "{SWEEPER}"
python = "{sys.executable}"
check = "allgather"
"""
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
    bin_directory = str(Path(sys.executable).parent)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-health-demo-") as directory,
        hooked_site(Path(directory), nodes=7) as site,
    ):
        lab = site.lab
        # The lab's nodes share process numbers: an epilog would see what belongs to other nodes.
        site.configure(SITE, share=0.5)
        _say(f"A real Slurm: slurmctld and 7 slurmd, {', '.join(lab.nodes)}, on this machine.")
        lab.fault.drop(BAD_NODE)
        _say(f"Packets between {BAD_NODE} and the other nodes are now dropped. Slurm sees nothing:")
        _show(lab, ["sinfo", "--format=%12N %6D %8T"])
        found = _train(lab, 4, bin_directory)
        drained = found and _drained(site, {"PATH": f"{bin_directory}:{os.defpath}"})
    return _end(found=found and drained)


def _drained(site: HookedSite, environ: dict[str, str]) -> bool:
    """Show what root makes of it, the repair and the return; tell whether the node was drained."""
    lab, nodes = site.lab, ["slurm-health", "nodes", f"--config={site.installed}/etc/config.toml"]
    _say(
        f"{USER} has no right to drain {BAD_NODE}, and one job's word drains no node. Root's epilog"
        f" read what the job had found, and has {BAD_NODE} checked with two partners by a job of"
        " the site's own user:"
    )
    lab.wait_until(
        lambda: BAD_NODE in site.out_of_pool(), bool, "the check with partners", DEADLINE_S
    )
    log = site.hook_log(BAD_NODE).splitlines()
    shown = [
        line
        for line in log
        if "accuses this node" in line or "partners" in line or "drained: " in line
    ]
    print("\n".join(shown), end="\n\n")
    _show(lab, nodes, environ, user="root")
    lab.fault.clear(BAD_NODE)
    _say(f"{BAD_NODE} is repaired: its packets arrive. An administrator returns it:")
    _show(lab, [*nodes, "release", BAD_NODE], environ, user="root")
    lab.wait_nodes()
    _show(lab, ["srun", f"--nodelist={BAD_NODE}", "hostname"])
    lab.wait_nodes()
    _show(lab, ["sinfo", "--format=%12N %6D %8T"])
    return BAD_NODE not in site.out_of_pool()


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
    failed = f"{BAD_NODE} was not found, or not drained; this should not be."
    _say("The lab is down again." if found else failed)
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


def _show(
    lab: Lab, argv: list[str], environ: dict[str, str] | None = None, user: str = USER
) -> str:
    print(f"{user}{'#' if user == 'root' else '$'} {' '.join(argv)}", flush=True)
    result = lab.run(argv, user=user, env=environ or {}, check=False)
    print(result.stdout + result.stderr, flush=True)
    return result.stdout


def _say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
