# SPDX-License-Identifier: Apache-2.0
"""What `--check` asks for: sets of probes, probes by name, and programs by path.

Probes of other packages are found through entry points of the groups `slurm_health.probes.solo`,
`.node`, `.rail` and `.pair`. The name of one is the probe's, its value the module that is its
file. That file is not loaded here: it may need torch, which only the job's interpreter has.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

from slurm_health.core.phases import BUILT_IN, SETS, Phase, Probe, Scope, phases
from slurm_health.errors import ConfigError

OFF = "off"
_GROUP = "slurm_health.probes"


def chosen_phases(value: str, option: str = "--check") -> tuple[Phase, ...]:
    """Return the phases that a comma-separated list asks for.

    Raises:
        ConfigError: an item is no set, no probe, and no program that can be run.
    """
    items = [item.strip() for item in value.split(",") if item.strip()]
    if not items:
        valid = ", ".join([*SETS, OFF])
        raise ConfigError(option, repr(value), f"names nothing to check; valid: {valid}")
    if OFF in items:
        raise ConfigError(option, OFF, "stands alone, for sbatch: a check without a check is none")
    built_in = {probe.name for probe in BUILT_IN}
    programs = [_program(item, option) for item in items if "/" in item]
    foreign = {*items} - built_in - SETS.keys() - {item for item in items if "/" in item}
    own = [_installed(name, option) for name in sorted(foreign)]
    names = [os.path.basename(item) if "/" in item else item for item in items]  # noqa: PTH119
    return phases(names, [*own, *programs])


def spelled_out(value: str, option: str) -> str:
    """Return the list with programs by their absolute paths, after checking every item.

    Raises:
        ConfigError: as for `chosen_phases`.
    """
    chosen_phases(value, option)
    items = [item.strip() for item in value.split(",") if item.strip()]
    return ",".join(os.path.abspath(item) if "/" in item else item for item in items)  # noqa: PTH100


def _program(path: str, option: str) -> Probe:
    if "," in path or not os.access(path, os.X_OK) or os.path.isdir(path):  # noqa: PTH112
        raise ConfigError(option, path, "is not a program that can be run here")
    name = os.path.basename(path)  # noqa: PTH119
    if name in {probe.name for probe in BUILT_IN} | SETS.keys():
        raise ConfigError(option, path, f"is named like the probe {name}; give it another name")
    return Probe(
        name=name,
        scope=Scope.SOLO,
        component=name,
        about="a program of your own",
        path=os.path.abspath(path),  # noqa: PTH100
    )


def _installed(name: str, option: str) -> Probe:
    """Return the probe of another package.

    Raises:
        ConfigError: there is none of that name, or its file cannot be found.
    """
    for scope in Scope:
        found: Iterable[EntryPoint] = entry_points(group=f"{_GROUP}.{scope.value}", name=name)
        for point in found:
            return Probe(
                name=name,
                scope=scope,
                component=name,
                about=f"{point.value}, of another package",
                path=_file_of(point, option),
            )
    raise ConfigError(option, name, "no such probe", valid=_all_names())


def _file_of(point: EntryPoint, option: str) -> str:
    try:
        spec = importlib.util.find_spec(point.module)
    except (ImportError, ValueError) as err:
        raise ConfigError(option, point.name, f"{point.module} cannot be found: {err}") from err
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(option, point.name, f"{point.module} is not a module of one file")
    return spec.origin


def _all_names() -> Sequence[str]:
    foreign = [p.name for scope in Scope for p in entry_points(group=f"{_GROUP}.{scope.value}")]
    return [*SETS, OFF, *(probe.name for probe in BUILT_IN), *sorted(foreign)]
