# SPDX-License-Identifier: Apache-2.0
"""What runs a probe of a name: ours, one in a Python file of a site's own, or any program."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm_health.preflight.probes.context import NodeFault, NotMeasured, ProbeContext, Sample

Measure = Callable[[ProbeContext], list[Sample]]
# The module of each probe of ours, and its function there. An all-gather of fewer members is the
# same one: the worker forms the group, the probe only uses it.
_OURS = {
    "values": ("compute", "values"),
    "matmul": ("compute", "matmul"),
    "memory_copy": ("memory", "copy"),
    "memory_pattern": ("memory", "pattern"),
    "allgather": ("exchange", "allgather"),
    "node_allgather": ("exchange", "allgather"),
    "rail_allgather": ("exchange", "allgather"),
}
_WITH_TORCH = {
    "host_copy": ("exchange", "host_copy"),
    "peer_copy": ("exchange", "peer_copy"),
    "gpt_fit": ("gpt", "measure_fit"),
    "gpt": ("gpt", "measure"),
}
FINE, NODE_FAULT, NOT_THE_NODE = 0, 77, 78


def measure_of(name: str, path: str, *, torch: bool) -> Measure | None:
    """Return what runs a probe, None for one that needs torch where there is none.

    Args:
        name: the probe's.
        path: its file, empty for one of ours.
        torch: whether there is torch.

    Raises:
        NotMeasured: the file cannot be loaded here, or is no probe.
    """
    if path.endswith(".py"):
        return _of_file(name, path, torch=torch)
    if path:
        return functools.partial(_measure_program, path)
    where = _OURS.get(name) or (_WITH_TORCH[name] if torch else None)
    if where is None:
        return None
    module = importlib.import_module(f"slurm_health.preflight.probes.{where[0]}")
    measure: Measure = getattr(module, where[1])
    return measure


@functools.cache
def _of_file(name: str, path: str, *, torch: bool) -> Measure | None:
    spec = importlib.util.spec_from_file_location(f"slurm_health_probe_{name}", path)
    if spec is None or spec.loader is None:
        raise NotMeasured(f"{name}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as err:  # the file is somebody else's: whatever it raises is not the node's
        if isinstance(err, ModuleNotFoundError) and err.name == "torch" and not torch:
            return None
        raise NotMeasured(f"{name}: {path} cannot be loaded: {type(err).__name__}: {err}") from err
    measure: Measure | None = getattr(module, "measure", None)
    if not callable(measure):
        raise NotMeasured(f"{name}: {path} has no function measure(context)")
    return measure


def _measure_program(path: str, context: ProbeContext) -> list[Sample]:
    """Run the program on the first worker of the node; how long it took is compared with peers.

    Raises:
        NodeFault: it ended with 77.
        NotMeasured: it ended with anything else than 0 and 77.
    """
    if context.local_rank != 0:
        return []
    environ = dict(os.environ, SLURM_HEALTH_DEVICES=str(context.local_size))
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
    reason = f"{Path(path).name}: {lines[-1] if lines else 'printed nothing'}"
    if done.returncode == NODE_FAULT:
        raise NodeFault(reason)
    if done.returncode != NOT_THE_NODE:
        reason += f" (exit code {done.returncode})"
    raise NotMeasured(reason)
