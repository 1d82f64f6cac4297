# SPDX-License-Identifier: Apache-2.0
"""Storms over a cluster of many real slurmds, and what must hold in each.

    python -m benchmarks.storms                              every storm, 40 nodes
    python -m benchmarks.storms --nodes 200 --only third     one storm, more nodes
    python -m benchmarks.storms --runner nhc --nhc DIRECTORY others' hooks in the same storms
    python -m benchmarks.storms --results FILE               go on where it was ended

It needs root. Ends with 1 where something was violated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.storms.cluster import Cluster, LedgerWatch, cluster_for
from benchmarks.storms.judge import allowed, lateness, violations
from benchmarks.storms.look import (
    Seen,
    await_normal,
    look_at_hooks,
    look_at_storm,
    quantile,
    states,
)
from benchmarks.storms.perform import Performance
from benchmarks.storms.plan import STORMS, Storm, events_of
from benchmarks.storms.runners import RUNNERS, can_compile
from tests.lab import LabError

_HEADERS = (
    "storm",
    "drained",
    "limit",
    "trip s",
    "messages",
    "jobs",
    "prologs",
    "wall p50/p99 s",
    "CPU p50/p99 s",
    "normal s",
    "wrong",
)


def main() -> int:
    """Run the storms and print the table."""
    options = _options()
    end_as_on_interrupt()
    known = _read(options.results)
    rows = []
    try:
        for storm in (STORMS[name] for name in options.only or STORMS):
            key = f"{options.runner} {options.nodes} {storm.name}"
            row = known.get(key)
            if row is None:
                print(f"{storm.name}: {storm.about}", file=sys.stderr, flush=True)
                row = run(storm, options)
                _append(options.results, key, row)
            rows.append(row)
            for wrong in (*row["wrong"], *row["late"]):
                print(f"  {wrong}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    except LabError as err:
        print(err, file=sys.stderr)
        return 3
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{options.nodes} nodes, {options.runner}, {os.cpu_count()} processors")
        print(tabulate([_line(row) for row in rows], headers=_HEADERS))
    return 1 if any(row["wrong"] for row in rows) else 0


def run(storm: Storm, options: argparse.Namespace) -> dict[str, Any]:
    """Let one storm pass over a cluster of its own; return what came of it."""
    names = [f"n{number + 1}" for number in range(options.nodes)]
    if storm.name == "clock" and not can_compile():
        return {"storm": storm.name, "wrong": [], "late": [], "skipped": "needs a C compiler"}
    events = events_of(storm, names, seed=options.seed, pace=options.pace)
    with tempfile.TemporaryDirectory(prefix="storm-") as place:
        started = cluster_for(
            storm,
            options.runner,
            options.nodes,
            Path(place),
            nhc=options.nhc,
            release=options.release,
        )
        with started as cluster, LedgerWatch(cluster) as watch:
            load = os.getloadavg()[0]
            performance = Performance(cluster, events, storm.lasts_s * options.pace)
            seen = _pass_over(cluster, performance, options.deadline_s)
            seen.trip_took_s = dict(watch.trip_took_s)
    ours = options.runner == "slurm-health"
    wrong = violations(storm, names, events, seen) if ours else []
    return _row(storm, names, seen, wrong, load)


def _pass_over(cluster: Cluster, performance: Performance, deadline_s: float) -> Seen:
    seen = Seen()
    cluster.lab.run(["sdiag", "-r"])
    performance.play()
    cluster.await_submissions()
    look_at_storm(cluster, seen, sorted(performance.broken))
    performance.mend()
    await_normal(cluster, seen, deadline_s)
    performance.end()
    look_at_hooks(cluster, seen)
    return seen


def _row(
    storm: Storm, nodes: Sequence[str], seen: Seen, wrong: list[str], load: float
) -> dict[str, Any]:
    prologs = [ran for ran in seen.ran if ran.hook == "prolog"]
    wall = [ran.wall_s for ran in prologs]
    cpu = [ran.cpu_s for ran in prologs]
    return {
        "storm": storm.name,
        "nodes": len(nodes),
        "drained": len(seen.drained),
        "limit": allowed(storm, nodes),
        "tripped": seen.tripped,
        "trip_took_s": seen.trip_took_s,
        "messages": seen.messages if storm.counted else None,
        "jobs": dict(states(seen)),
        "submitted": len(seen.submitted),
        "restarted": seen.restarted,
        "prologs": len(prologs),
        "prologs_failed": sum(ran.code != 0 for ran in prologs),
        "healthchecks": sum(ran.hook == "healthcheck" for ran in seen.ran),
        "wall_s": [quantile(wall, 0.5), quantile(wall, 0.99)],
        "cpu_s": [quantile(cpu, 0.5), quantile(cpu, 0.99)],
        "normal_s": round(seen.normal_s, 1),
        "still_out": seen.still_out,
        "load": load,
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "wrong": wrong,
        "late": lateness(seen),
        "said": seen.said if wrong else {},
    }


def _line(row: dict[str, Any]) -> list[object]:
    if "skipped" in row:
        return [row["storm"], row["skipped"]]
    took = row["trip_took_s"]
    messages = row["messages"]
    return [
        row["storm"],
        row["drained"],
        row["limit"],
        f"{max(took.values()):.1f}" if isinstance(took, dict) and took else "",
        sum(messages.values()) if isinstance(messages, dict) else "",
        f"{row['submitted']}, {row['restarted']} again",
        f"{row['prologs']}, {row['prologs_failed']} failed",
        *("/".join(f"{value:.2f}" for value in row[key]) for key in ("wall_s", "cpu_s")),
        row["normal_s"],
        len(row["wrong"]),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=count, default=40, help="how many (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=list(STORMS), metavar="STORM")
    parser.add_argument("--runner", choices=list(RUNNERS), default="slurm-health")
    parser.add_argument("--nhc", type=Path, help="NHC's source tree, for --runner nhc")
    parser.add_argument("--release", type=Path, help="root of another Slurm release")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=1.0, help="stretches the storms' time")
    parser.add_argument("--deadline-s", type=float, default=600, help="until all must be normal")
    parser.add_argument("--results", type=Path, help="keep each storm's there; go on from it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.runner == "nhc" and options.nhc is None:
        parser.error("--runner nhc needs --nhc DIRECTORY, NHC's source tree")
    return options


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {each["key"]: each["row"] for each in map(json.loads, lines)}


def _append(path: Path | None, key: str, row: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"key": key, "row": row}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
