# SPDX-License-Identifier: Apache-2.0
"""What a check costs on many nodes: time, the master's processor, bytes and opens.

    python -m benchmarks.scale                          64, 512, 1,024, 4,096 and 16,384 nodes
    python -m benchmarks.scale --nodes 64 --nodes 512
    python -m benchmarks.scale --nodes 4096 --bad 0     all healthy
    python -m benchmarks.scale --open-ms 5              a slower filesystem

The master, the agents' code, the Localizer and the journal are real, the nodes are simulated:
`benchmarks/scale_world.py` says how. Each row runs in a process of its own. A row of 16,384 nodes
takes minutes and some GB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.results import keep, machine_facts, machine_line
from benchmarks.scale_node import Clock, Filesystem
from benchmarks.scale_world import Cluster
from slurm_health.preflight.agent.workers import AgentSettings
from slurm_health.preflight.master.master import SILENCE_S, Master, poll_interval_s
from slurm_health.preflight.master.run_check import load_ahead, make_localizer
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.probe_catalog import SETS
from slurm_health.records.records import RunStarted
from slurm_health.records.verdict import Level
from slurm_health.system import journal

NODES = (64, 512, 1024, 4096, 16384)
BAD_PERCENT = (0.0, 1.0)
_PLACE = Path("/dev/shm")
_MB = 1e6


def main() -> int:
    """Print the table; return 1 if a verdict was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=count, action="append", help="may be repeated")
    parser.add_argument("--bad", type=_percent, action="append", help="percent of bad nodes")
    parser.add_argument("--open-ms", type=float, default=1.0, help="of the filesystem (1, as NFS)")
    parser.add_argument("--check", default="quick", choices=sorted(SETS), help="probes (quick)")
    parser.add_argument(
        "--leaf", type=_leaf_size, default=32, help="nodes of a leaf switch; 0: not known (32)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object per row")
    parser.add_argument("--keep", action="store_true", help="in benchmarks/results/scale.json")
    parser.add_argument("--cut", action="store_true", help="with a bell that nobody hears")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_as_on_interrupt()
    cells = [(n, bad) for n in options.nodes or NODES for bad in options.bad or BAD_PERCENT]
    try:
        if options.here:
            ((nodes, bad),) = cells
            print(json.dumps(measure(nodes, bad, options)))
            return 0
        return _print_table(cells, options)
    except KeyboardInterrupt:
        if not options.here:
            print("benchmarks.scale: interrupted", file=sys.stderr)
        return INTERRUPTED


def _print_table(cells: Sequence[tuple[int, float]], options: argparse.Namespace) -> int:
    machine = machine_facts()
    print(machine_line(machine), file=sys.stderr)
    rows = []
    for nodes, bad in cells:
        rows.append(_measured_apart(nodes, bad, options))
        if options.json:
            print(json.dumps(rows[-1]), flush=True)
        else:
            print(f"{nodes} nodes, {bad:g} % bad: {rows[-1]['real s']:.0f} s", file=sys.stderr)
    if not options.json:
        print(tabulate(rows, headers="keys", floatfmt=".2f"))
    if options.keep:
        named = [{"case": f"{row['nodes']}, {row['bad %']:g} %", **row} for row in rows]
        keep("scale", machine, named)
    return 0 if all(row["right"] for row in rows) else 1


def measure(nodes: int, bad: float, options: argparse.Namespace) -> dict[str, object]:
    """Run one check in the directory `options.here`; return its row of the table."""
    began_s = time.monotonic()
    clock = Clock()
    files = Filesystem(clock=clock, open_s=options.open_ms / 1e3, parallel=journal.AT_A_TIME)
    directory = options.here / "cluster" / "1" / "0"

    def settings(name: str, launch: int) -> AgentSettings:
        return AgentSettings(
            node=name,
            directory=directory,
            run_id="r",
            launch=launch,
            python="python3",
            poll_s=poll_interval_s(nodes),
            silence_s=SILENCE_S,
        )

    def groups_now() -> list[tuple[str, ...]]:
        current = master.state.round
        assert current is not None
        return current.groups

    cluster = Cluster(
        nodes,
        bad / 100,
        files,
        clock,
        settings=settings,
        groups_now=groups_now,
        bell_works=not options.cut,
        leaf_size=options.leaf,
    )
    master = Master(
        directory,
        Controller(list(cluster.nodes), make_localizer, TimeLimits(), phases([options.check])),
        cluster,
        load_ahead=load_ahead,
        clock=clock,
    )
    files.watch()
    begin_s = clock.now_s
    clock.master_works(True)
    master.open(_started(list(cluster.nodes)))
    verdict = master.run()
    clock.master_works(False)
    took_s = clock.now_s - begin_s
    opens, polls = sum(files.opens.values()), sum(files.polls.values())
    cluster.wait(2 * poll_interval_s(nodes), math.inf)  # the agents hear of the end
    written = journal.path_of(directory, journal.MASTER).stat().st_size
    master.close()
    found = {node.node for node in verdict.nodes if node.level is not Level.HEALTHY}
    return {
        "nodes": nodes,
        "bad %": bad,
        "rounds": len(master.state.ended),
        "verdict s": round(took_s, 2),
        "of it measuring s": round(cluster.measuring_s, 2),
        "beyond s": round(took_s - cluster.measuring_s, 2),
        "master CPU s": round(clock.cpu_s, 2),
        "master.jsonl MB": round(written / _MB, 2),
        "agents read MB": round(cluster.agents_read / _MB, 1),
        "opens master": files.opens["master"],
        "opens agents": files.opens["agents"],
        "polls/s": round(polls / took_s),
        "other opens per node": round((opens - polls) / nodes, 1),
        "right": found == cluster.bad,
        "real s": round(time.monotonic() - began_s, 1),
    }


def _measured_apart(nodes: int, bad: float, options: argparse.Namespace) -> Mapping[str, float]:
    """Measure in a process of its own: no audit hook can be removed."""
    with tempfile.TemporaryDirectory(dir=_PLACE, prefix="slurm-health-scale-") as place:
        argv = [sys.executable, "-m", "benchmarks.scale", f"--here={place}", f"--nodes={nodes}"]
        argv += [f"--bad={bad:g}", f"--open-ms={options.open_ms:g}", f"--check={options.check}"]
        argv += [f"--leaf={options.leaf}"] + (["--cut"] if options.cut else [])
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    done.check_returncode()
    row: dict[str, float] = json.loads(done.stdout)
    return row


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 50.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 50")
    return value


def _leaf_size(text: str) -> int:
    return 0 if text == "0" else count(text)


def _started(nodes: list[str]) -> RunStarted:
    return RunStarted(
        run_id="r",
        job_id=1,
        attempt=0,
        cluster="cluster",
        partition="",
        nodes=nodes,
        master_node=nodes[0],
        user="u",
    )


if __name__ == "__main__":
    raise SystemExit(main())
