# SPDX-License-Identifier: Apache-2.0
"""Find the `measure` function of a probe: ours, a Python file's, or that of any program."""

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


class NeedsTorch(NotMeasured):
    """A site's own probe that loads torch, where there is none."""


# The same exchange in smaller circles: the worker forms the group, the probe only uses it.
_MODULES = {"node_allgather": "allgather", "rail_allgather": "allgather"}


def measure_of(name: str, path: str) -> Measure:
    """Return what runs a probe. `path` is empty for one of ours.

    Raises:
        NotMeasured: the file cannot be loaded here, or is no probe.
    """
    if not path:
        measure: Measure = importlib.import_module(
            f"slurm_health.preflight.probes.{_MODULES.get(name, name)}"
        ).measure
        return measure
    if not path.endswith(".py"):
        return functools.partial(measure_program, path)
    return _of_file(name, path)


@functools.cache
def _of_file(name: str, path: str) -> Measure:
    spec = importlib.util.spec_from_file_location(f"slurm_health_probe_{name}", path)
    if spec is None or spec.loader is None:
        raise NotMeasured(f"{name}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as err:
        kind = NeedsTorch if err.name == "torch" else NotMeasured
        raise kind(f"{name}: {path} cannot be loaded: {err}") from err
    except Exception as err:  # the file is somebody else's: whatever it raises is not the node's
        raise NotMeasured(f"{name}: {path} cannot be loaded: {type(err).__name__}: {err}") from err
    measure = getattr(module, "measure", None)
    if not callable(measure):
        raise NotMeasured(f"{name}: {path} has no function measure(context)")
    found: Measure = measure
    return found


FINE, NODE_FAULT, NOT_THE_NODE = 0, 77, 78


def measure_program(path: str, context: ProbeContext) -> list[Sample]:
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
    said = f"{Path(path).name}: {lines[-1] if lines else 'said nothing'}"
    if done.returncode == NODE_FAULT:
        raise NodeFault(said)
    if done.returncode == NOT_THE_NODE:
        raise NotMeasured(said)
    raise NotMeasured(f"{said} (exit code {done.returncode})")
