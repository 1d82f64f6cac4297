# SPDX-License-Identifier: Apache-2.0
"""What a worker works with: torch, or nothing but Python and numpy. One face for both.

A worker and its rounds go through a kit and never ask which one it is. `torch_kit` is for the
interpreter that the job trains with, `light_kit` for any. A probe is of one kit, and may have a
sibling of the same name in the other: `measure_of` finds those that torch has, those in a Python
file of a site's own, and any program.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from slurm_health.preflight.probes.context import NodeFault, NotMeasured, ProbeContext, Sample

Check = Callable[[], None]
Measure = Callable[[ProbeContext], list[Sample]]


class Store(Protocol):
    """Through which the members of a group find each other; keys are seen by all of them."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether there is a value of each key."""


OpenStore = Callable[[str, int], Callable[[str], Store]]
"""Connects to the store at an address and a port; returns what gives its part of a prefix."""


class Membership(Protocol):
    """The group that a worker is in, at most one at a time. Whatever waits calls `check`."""

    def form(
        self, store: Any, *, rank: int, world_size: int, timeout: timedelta, check: Check
    ) -> None:
        """Form it with all its members."""

    def part(self, ranks: list[int], *, timeout: timedelta, check: Check) -> Any:
        """Return a part of it with these ranks, which every member is in one of."""

    def exchange_first(self, group: Any, check: Check) -> None:
        """Make sure that a part (None: the whole group) can exchange data at all."""

    def leave(self) -> None:
        """Leave it, if there is one."""

    def leave_broken(self) -> bool:
        """Leave one of which a member may be missing; tell whether this worker is still good."""

    def interrupt(self) -> None:
        """End whatever the main thread waits for in it without calling `check`."""


class Kit(Protocol):
    """What the probes of a worker are made with.

    `version` is of torch, empty where there is none.
    """

    @property
    def version(self) -> str:
        """The version of torch."""

    def claim(self, local_rank: int, *, devices: int, environ: Mapping[str, str]) -> Any:
        """Return the device of a worker.

        Raises:
            Unusable: the device or its driver failed.
            SystemExit: it cannot be used for another reason.
        """

    def serve_store(self) -> tuple[object, int]:
        """Serve a store for as long as this object lives; return its port too."""

    def facts(self, device: Any, *, devices: int, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return what the event `ready` says of a worker.

        Raises:
            Unusable: the device failed.
            SystemExit: it cannot be used for another reason.
        """

    def open_store(self, timeout: timedelta) -> OpenStore:
        """Return what connects to the store of another worker."""

    def membership(self, device: Any) -> Membership:
        """Return the group of a worker with this device: none as yet."""

    def context(self, membership: Any, **fields: Any) -> ProbeContext:
        """Return what a probe is given."""

    def measure_of(self, name: str, path: str) -> Measure | None:
        """Return what runs a probe, None where it is one of the other kit.

        Raises:
            NotMeasured: its file cannot be loaded, or is no probe.
        """

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""

    def users(self, device: Any) -> str:
        """Return which other processes use a device, empty where none is known of."""

    def ways(self, device: Any, environ: Mapping[str, str]) -> str:
        """Return by which ways data has gone so far, empty where that is not known."""

    def is_replaced(self, device: Any) -> bool:
        """Tell whether a worker with such a device is replaced after what may have spoilt it."""


class NeedsTorch(NotMeasured):
    """A site's own probe that loads torch, where there is none."""


# The module of each probe with torch, and its function there. Of others the module has their name,
# and the function is `measure`. An exchange in smaller circles is the same one: the worker forms
# the group, the probe only uses it.
_WITH_TORCH = {
    "values": ("compute", "values"),
    "matmul": ("compute", "matmul"),
    "matmul_fp8": ("compute", "matmul_fp8"),
    "memory_copy": ("memory", "copy"),
    "memory_pattern": ("memory", "pattern"),
    "host_copy": ("device_copy", "host"),
    "peer_copy": ("device_copy", "peers"),
    "node_allgather": ("allgather", "measure"),
    "rail_allgather": ("allgather", "measure"),
    "gpt_fit": ("gpt", "measure_fit"),
}


def measure_of(name: str, path: str) -> Measure:
    """Return what runs a probe. `path` is empty for one of ours.

    Raises:
        NotMeasured: the file cannot be loaded here, or is no probe.
    """
    if not path:
        module, function = _WITH_TORCH.get(name, (name, "measure"))
        return function_of(module, function)
    if not path.endswith(".py"):
        return functools.partial(measure_program, path)
    return _of_file(name, path)


def function_of(module: str, function: str) -> Measure:
    """Return a probe of ours, by the name of its module."""
    measure: Measure = getattr(
        importlib.import_module(f"slurm_health.preflight.probes.{module}"), function
    )
    return measure


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
    said = f"{Path(path).name}: {lines[-1] if lines else 'printed nothing'}"
    if done.returncode == NODE_FAULT:
        raise NodeFault(said)
    if done.returncode == NOT_THE_NODE:
        raise NotMeasured(said)
    raise NotMeasured(f"{said} (exit code {done.returncode})")
