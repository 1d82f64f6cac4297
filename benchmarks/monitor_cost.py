# SPDX-License-Identifier: Apache-2.0
"""What the monitor costs: its memory and CPU on each node, and what it does to a step's time.

    python -m benchmarks.monitor_cost                 4 pairs of 120 s
    python -m benchmarks.monitor_cost --pairs 10

Two jobs of three nodes train at the same time, one of them watched, so that whatever else the
machine does meets both; sides change from pair to pair. Exits 0 if the monitor keeps within 0.3 %
of a core and 40 MB on every node; 1 if not; 3 if a job did not end as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.results import machine_facts, machine_line
from tests.lab import Lab, processes
from tests.lab.installed_site import Site
from tests.lab.played_nodes import play, submit

_SIDES = ("n[1-3]", "n[4-6]")
_SKIP_S = 45.0  # until the agents run, and have searched for processes a time or two
_MOST_CPU, _MOST_MB = 0.003, 40.0
_TRAINING = Path(__file__).with_name("steady_training.py")
_SCRIPT = """#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + SLURM_JOB_ID))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun {python} steady_training.py "$@"
"""
_PARTS = {
    "slurm_health.training.monitor.watch": "watch",
    "slurm_health.training.monitor.agent": "agent",
    "--job-name=slurm-health": "srun",
}


@dataclass(frozen=True)
class Used:
    """What one process of ours used on a node: its own share of memory, and of a core."""

    node: str
    part: str
    pss_mb: float
    rss_mb: float
    cpu_share: float


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.monitor_cost")
    parser.add_argument("--pairs", type=count, default=4, metavar="N", help="[%(default)s]")
    parser.add_argument(
        "--seconds", type=float, default=_SKIP_S + 120.0, help="of each training [%(default)g]"
    )
    options = parser.parse_args()
    if options.seconds <= _SKIP_S:
        parser.error(f"--seconds: the first {_SKIP_S:g} do not count, until the monitors run")
    print(machine_line(machine_facts()), flush=True)
    end_as_on_interrupt()
    ratios: list[float] = []
    used: list[Used] = []
    try:
        with Lab.start(nodes=6, name=f"{Path.cwd().name}-cost-{os.getpid()}") as lab:
            site = Site(lab)
            site.script("steady_training.py", _TRAINING.read_text())
            site.script("train.sh", _SCRIPT.format(python=sys.executable))
            play(site)
            for pair in range(options.pairs):
                ratio, of_pair = _pair(
                    site, options.seconds, _SIDES[pair % 2], _SIDES[1 - pair % 2]
                )
                used += of_pair
                if ratio is None:
                    return 3
                ratios.append(ratio)
                print(f"pair {pair + 1}: step time watched / unwatched {ratio:.4f}", flush=True)
    except KeyboardInterrupt:
        print("benchmarks.monitor_cost: interrupted; the lab is down", file=sys.stderr)
        return INTERRUPTED
    print(table(used))
    print(
        f"step time, watched / unwatched: median {statistics.median(ratios):.4f}"
        f" ({min(ratios):.4f} … {max(ratios):.4f}) of {len(ratios)} pairs"
    )
    return 0 if _within(used) else 1


def table(used: list[Used]) -> str:
    """Return what each part used, the medians over nodes and pairs."""
    rows = []
    for part in dict.fromkeys(each.part for each in used):
        of_part = [each for each in used if each.part == part]
        rows.append(
            [
                part,
                f"{statistics.median(each.pss_mb for each in of_part):.1f} MB",
                f"{statistics.median(each.rss_mb for each in of_part):.1f} MB",
                f"{statistics.median(each.cpu_share for each in of_part):.3%}",
                len(of_part),
            ]
        )
    headers = ["process", "PSS", "RSS", "of a core", "measured"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _within(used: list[Used]) -> bool:
    by_node: dict[str, list[Used]] = {}
    for each in used:
        by_node.setdefault(each.node, []).append(each)
    for node, parts in by_node.items():
        runs = max(1, sum(each.part.startswith("agent") for each in parts))
        pss_mb = sum(each.pss_mb for each in parts) / runs
        share = sum(each.cpu_share for each in parts) / runs
        print(f"{node}: {pss_mb:.1f} MB (PSS), {share:.3%} of a core")
        if pss_mb > _MOST_MB or share > _MOST_CPU:
            return False
    return bool(by_node)


def _pair(
    site: Site, seconds: float, watched: str, unwatched: str
) -> tuple[float | None, list[Used]]:
    jobs = {
        "report": _submit(site, seconds, watched, "report"),
        "off": _submit(site, seconds, unwatched, "off"),
    }
    used = _measured(site, seconds)
    medians = {}
    for mode, job in jobs.items():
        state = site.ended(job, seconds + 600)["JobState"]
        lines = [line for line in site.read(f"out-{job}.txt").splitlines() if line[:1] == "{"]
        if state != "COMPLETED" or not lines:
            print(f"job {job} ({mode}): {state}\n{site.read(f'out-{job}.txt')[-2000:]}")
            return None, used
        medians[mode] = json.loads(lines[-1])["median_ms"]
    return medians["report"] / medians["off"], used


def _submit(site: Site, seconds: float, nodes: str, mode: str) -> int:
    return submit(
        site,
        "-N3",
        f"--nodelist={nodes}",
        "--ntasks-per-node=1",
        "--output=out-%j.txt",
        "--no-requeue",
        f"--monitor={mode}",
        "train.sh",
        str(seconds),
        str(_SKIP_S),
        script="",
    )


def _measured(site: Site, seconds: float) -> list[Used]:
    """Wait for the agents, let them work, and return what their processes used."""
    site.lab.wait_until(
        lambda: site.processes_with("slurm_health.training.monitor.agent"),
        lambda found: len(found) >= 2,
        "the agents of two nodes",
        400,
    )
    before = _ours(site)
    began_s = time.monotonic()
    for_s = max(20.0, seconds - _SKIP_S - 30.0)
    time.sleep(for_s)
    after = _ours(site)
    elapsed_s = time.monotonic() - began_s
    used = []
    for (node, part, pid), cpu_s in after.items():
        if (node, part, pid) not in before:
            continue
        pss_mb, rss_mb = _memory_mb(pid)
        share = (cpu_s - before[node, part, pid]) / elapsed_s
        used.append(Used(node, part, pss_mb, rss_mb, share))
    return used


def _ours(site: Site) -> dict[tuple[str, str, int], float]:
    """Return the CPU seconds of our processes by node, part and number."""
    found = {}
    for node in site.lab.nodes:
        watches: set[int] = set()
        for process in sorted(processes.on_node(site.lab.pid(node)), key=lambda each: each.pid):
            for word, part in _PARTS.items():
                # The srun of the agents has their words behind its own.
                name = Path(process.argv[0]).name if process.argv else ""
                if word in process.argv and (part == "srun") == (name == "srun"):
                    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                    ticks = int(stat[11]) + int(stat[12])
                    of_fork = int(stat[1]) in watches  # the agent of the first node
                    watches |= {process.pid} if part == "watch" else set()
                    key = node, "agent, a fork" if of_fork else part, process.pid
                    found[key] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return PSS and RSS."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return kib["Pss"] / 1024, kib["Rss"] / 1024


if __name__ == "__main__":
    sys.exit(main())
