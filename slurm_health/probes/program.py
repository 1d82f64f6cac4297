# SPDX-License-Identifier: Apache-2.0
"""Any program as a probe: it runs once per node, and its exit code is its finding.

    0   the node is fine
    77  the node is at fault; the last line of standard error says why
    78  nothing was found out, and the node is not to blame; the last line says why

Any other code, a signal, or a program that cannot be started counts like 78.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from slurm_health.probes.place import NodeFault, NotMeasured, Place, Sample

FINE, NODE_FAULT, NOT_THE_NODE = 0, 77, 78


def measure(path: str, place: Place) -> list[Sample]:
    """Run the program on the first worker of the node; how long it took is compared with peers.

    Raises:
        NodeFault: it ended with 77.
        NotMeasured: it ended with anything else than 0 and 77.
    """
    if place.local_rank != 0:
        return []
    environ = dict(os.environ, SLURM_HEALTH_DEVICES=str(place.local_size))
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [path],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as err:
        raise NotMeasured(f"{path} cannot be run: {err.strerror}") from err
    elapsed_ms = (time.perf_counter() - start) * 1e3
    if done.returncode == FINE:
        return [Sample(iteration_ms=[elapsed_ms])]
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    said = f"{Path(path).name}: {lines[-1] if lines else 'said nothing'}"
    if done.returncode == NODE_FAULT:
        raise NodeFault(said)
    if done.returncode == NOT_THE_NODE:
        raise NotMeasured(said)
    raise NotMeasured(f"{said} (exit code {done.returncode})")
