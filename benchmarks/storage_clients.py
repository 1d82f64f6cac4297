# SPDX-License-Identifier: Apache-2.0
"""What the test of storage asks of a server: many clients at once, each a process of its own.

    python -m benchmarks.storage_clients                      256 clients, GlusterFS in a lab
    python -m benchmarks.storage_clients --clients 1000

All of them share one client of the filesystem, and this machine. Prints how long it took, what was
written, and whether storage was judged as anything but well.
Exits 1 if one was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from slurm_health.preflight.agent.storage import StorageTest
from slurm_health.preflight.session.storage import at_most_s, judge
from slurm_health.records.nodeset import fold
from slurm_health.records.probe_catalog import STORAGE_NODES, STORAGE_PATHS
from slurm_health.records.records import StorageTested
from tests.lab import Lab

_MB = 2048


def main() -> int:
    """Measure, in a lab or, with `--path`, here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--path", default="")
    options = parser.parse_args()
    if options.path:
        return measure(options.path, options.clients)
    with Lab.start(nodes=1, network_filesystem_mb=_MB) as lab:
        argv = [sys.executable, "-m", "benchmarks.storage_clients", f"--path={lab.paths.shared}"]
        ran = lab.run([*argv, f"--clients={options.clients}"], deadline_s=300, cwd=".", check=False)
    print(ran.stdout, end="")
    return ran.returncode


def measure(path: str, clients: int) -> int:
    """Run the tests of so many nodes at one path."""
    nodes = [f"n{number}" for number in range(clients)]
    options = {STORAGE_NODES: fold(nodes), STORAGE_PATHS: path}
    begun_s = time.monotonic()
    tests = {node: StorageTest(node, options, "secret") for node in nodes}
    done: list[StorageTested] = []
    while len(done) < clients and time.monotonic() - begun_s < at_most_s(clients) + 30.0:
        for test in tests.values():
            done += test.poll()
        time.sleep(0.05)
    took_s = time.monotonic() - begun_s
    for test in tests.values():
        test.end()
    small_ms = sorted(test.small_ms for test in done)
    large_ms = sorted(test.large_ms for test in done)
    verdicts = [verdict.reason for verdict in judge(done)]
    result = {
        "clients": clients,
        "answered": len(done),
        "took_s": round(took_s, 2),
        "written_mb": round(sum(test.large_bytes for test in done) / 1e6, 1),
        "median_small_ms": small_ms[len(done) // 2] if done else None,
        "median_large_ms": large_ms[len(done) // 2] if done else None,
        "statuses": sorted({test.status for test in done}),
        "verdicts": verdicts,
    }
    print(json.dumps(result, indent=2))
    return int(bool(verdicts) or len(done) < clients)


if __name__ == "__main__":
    sys.exit(main())
