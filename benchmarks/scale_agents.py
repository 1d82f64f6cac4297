# SPDX-License-Identifier: Apache-2.0
"""A check with as many real agents as this machine holds, beside the table of simulated nodes.

    python -m benchmarks.scale_agents                          16, 64 and 128 nodes
    python -m benchmarks.scale_agents --nodes 256
    python -m benchmarks.scale_agents --lab --nodes 128        on the lab's Slurm, by light probes

Master, agents, journal, orders and bell are real, and each agent is a process of its own with a
worker process, all on this machine. Only what a worker would measure with torch is played. All of
them share the machine's processors, so the time says how much work there is in all, not how long
a check takes on nodes of their own. A node takes about 60 MB.

With `--lab` nothing is played: it is a job of a real Slurm, and beside each check stands what a
bare `srun python3 -I -c pass` took on the same nodes just before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tabulate import tabulate

from benchmarks.check_measure import Fault, Stage, measure_check
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.run_check import check_local
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.records import AgentsLaunched, RoundEnded, VerdictReached
from slurm_health.records.verdict import Level
from slurm_health.system import journal

NODES = (16, 64, 128)
_WORKER = Path(__file__).parents[1] / "tests" / "support" / "fake_worker.py"


def main() -> int:
    """Print the table; return 1 if a verdict was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=count, action="append", help="may be repeated")
    parser.add_argument("--lab", action="store_true", help="on the lab, by light probes")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_as_on_interrupt()
    if options.here:
        _check(options.nodes[0], options.here)
        return 0
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors", file=sys.stderr)
    try:
        rows = [(on_lab if options.lab else measure)(nodes) for nodes in options.nodes or NODES]
    except KeyboardInterrupt:
        print("benchmarks.scale_agents: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    return 0 if all(row["right"] for row in rows) else 1


def measure(nodes: int) -> Mapping[str, float]:
    """Check so many played nodes of this machine; return their row of the table."""
    with tempfile.TemporaryDirectory(prefix="slurm-health-agents-") as place:
        argv = [sys.executable, "-m", "benchmarks.scale_agents"]
        argv += [f"--here={place}", f"--nodes={nodes}"]
        environ = {**os.environ, "FAKE_WORKER_DIR": place}
        with subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL) as process:
            try:
                _, _, used = os.wait4(process.pid, 0)  # of its agents too, for which it has waited
                process.returncode = 0
            except KeyboardInterrupt:
                process.terminate()
                raise
        return {"nodes": nodes, **_found(Path(place)), "CPU s": used.ru_utime + used.ru_stime}


def on_lab(nodes: int) -> Mapping[str, float]:
    """Check so many nodes of the lab by light probes; return their row of the table."""
    with Stage(nodes) as stage:
        found = measure_check(stage, nodes, Fault(), (Level.HEALTHY,), "light")
    assert found.bare_s is not None
    launch_s = float("nan") if found.launch_s is None else found.launch_s
    return {
        "nodes": nodes,
        "bare srun s": found.bare_s,
        "launch s": launch_s,
        "of a bare srun": launch_s / found.bare_s,
        "command to verdict s": found.elapsed_s,
        "right": not found.wrong,
    }


def _check(nodes: int, place: Path) -> None:
    """Check them as `slurm-health check --local` would, which takes fewer."""
    settings = CheckSettings(
        journal_root=place / "journal",
        python=str(_worker(place)),
        policy=Policy(),
        limits=TimeLimits(),
        phases=tuple(phases(["quick"])),
    )
    check_local(nodes, settings, os.environ, now_s=time.time())


def _worker(place: Path) -> Path:
    """Return what plays the workers, which must be executable by its name."""
    copy = place / "python3"
    shutil.copyfile(_WORKER, copy)
    copy.chmod(0o700)
    return copy


def _found(place: Path) -> dict[str, float]:
    (master,) = place.glob("journal/*/*/*/master.jsonl")
    entries = journal.read_all(master.parent, journal.MASTER)
    launched = [each for each in entries if isinstance(each.record, AgentsLaunched)]
    reached = [each for each in entries if isinstance(each.record, VerdictReached)]
    verdict = reached[-1].record
    assert isinstance(verdict, VerdictReached)
    return {
        "launches": len(launched),
        "rounds": sum(isinstance(each.record, RoundEnded) for each in entries),
        "launch to verdict s": reached[-1].time_s - launched[0].time_s,
        "right": all(node.level is Level.HEALTHY for node in verdict.nodes),
    }


if __name__ == "__main__":
    raise SystemExit(main())
