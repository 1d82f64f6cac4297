# SPDX-License-Identifier: Apache-2.0
"""What the watch of a job costs on its first node, by how many nodes send reports; simulated.

    python -m benchmarks.monitor_scale              64 and 4,096 nodes of eight ranks each

Agents send every five seconds. Reports are read, decoded and observed as in a job, and all programs
are asked whether they are due; no process runs beside this one.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator

import msgspec
from tabulate import tabulate

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import count
from slurm_health.training.diagnosis.pulse import Pulse
from slurm_health.training.diagnosis.samples import NodeReport, RankSample
from slurm_health.training.monitor.agent import SAMPLE_S
from slurm_health.training.monitor.messages import REPORTS, MessageReader, lines_of

_RANKS = 8
_ROUNDS = 12


def _reports(nodes: int, number: int) -> Iterator[bytes]:
    for node in range(nodes):
        ranks = tuple(
            RankSample(
                rank=_RANKS * node + rank,
                node=f"n{node}",
                program="0",
                pid=1000 + rank,
                world=_RANKS * nodes,
                state="S",
                step=10 * number,
                steps=10 * number,
                age_s=0.3,
                typical_s=0.5123,
                longest_s=3.21,
                cpu_s=123.45 + number,
                io_bytes=123_456_789 + 1000 * number,
                ran_s=99.123 + number,
                unserved_s=0.123,
                wakes=12_345 + number,
                moves=number,
                longest_rest_s=5.0,
            )
            for rank in range(_RANKS)
        )
        yield from lines_of(NodeReport(node=f"n{node}", ranks=ranks), number)


def _measured(nodes: int) -> list[str]:
    """Return what a watch of so many nodes uses."""
    pulse, reader = Pulse([f"n{node}" for node in range(nodes)]), MessageReader(REPORTS)
    spent_s = due_s = sent_bytes = 0.0
    for number in range(1, _ROUNDS + 1):
        lines = [line.rstrip(b"\n") for line in _reports(nodes, number)]
        sent_bytes += sum(map(len, lines))
        now_s = 1000.0 + SAMPLE_S * number
        began_s = time.process_time()
        for line in lines:
            if (report := reader.take(line)) is not None:
                pulse.observe(report, now_s)
        spent_s += time.process_time() - began_s
        began_s = time.process_time()
        assert pulse.due(now_s) is None
        due_s += time.process_time() - began_s
    share = spent_s / (_ROUNDS * SAMPLE_S)
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        f"{nodes:,}",
        f"{share:.2%}",
        f"{1e6 * spent_s / _ROUNDS / nodes:.0f} µs",
        f"{1e3 * due_s / _ROUNDS:.2f} ms",
        f"{sent_bytes / _ROUNDS / SAMPLE_S / 1e3:.0f} kB/s",
        f"{most_mb:.0f} MB",
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor_scale", description=__doc__)
    parser.add_argument("--nodes", type=count, nargs="+", default=[64, 4096], metavar="N")
    options = parser.parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    msgspec.json.encode(NodeReport(node="n1"))  # nothing is measured of a first use
    rows = [_measured(nodes) for nodes in options.nodes]
    headers = ["nodes", "of a core", "a report", "is any due", "received", "memory at most"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
