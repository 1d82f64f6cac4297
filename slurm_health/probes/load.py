# SPDX-License-Identifier: Apache-2.0
"""Find the `measure` function of a probe: ours, a Python file's, or that of any program."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

from slurm_health.probes.place import NotMeasured, Place, Sample

Measure = Callable[[Place], list[Sample]]


def measure_of(name: str, path: str) -> Measure:
    """Return what runs a probe. `path` is empty for one of ours.

    Raises:
        NotMeasured: the file cannot be loaded here, or is no probe.
    """
    if not path:
        measure: Measure = importlib.import_module(f"slurm_health.probes.{name}").measure
        return measure
    if not path.endswith(".py"):
        from slurm_health.probes import program

        return functools.partial(program.measure, path)
    return _of_file(name, path)


@functools.cache
def _of_file(name: str, path: str) -> Measure:
    spec = importlib.util.spec_from_file_location(f"slurm_health_probe_{name}", path)
    if spec is None or spec.loader is None:
        raise NotMeasured(f"{name}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as err:  # the file is somebody else's: whatever it raises is not the node's
        raise NotMeasured(f"{name}: {path} cannot be loaded: {type(err).__name__}: {err}") from err
    measure = getattr(module, "measure", None)
    if not callable(measure):
        raise NotMeasured(f"{name}: {path} has no function measure(place)")
    found: Measure = measure
    return found
