# SPDX-License-Identifier: Apache-2.0
"""The value of `--check`: sets of probes, probes by name, and programs by path.

Other packages name probes in entry points of the groups `slurm_health.probes.solo`, `.node`,
`.rail` and `.pair`. The name of one is the probe's, its value the module that is its file. That
file is not loaded here: it may need torch, which only the job's interpreter has.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_health.records.errors import ConfigError
from slurm_health.records.probe_catalog import (
    BUILT_IN,
    DEFAULT,
    LIGHT_SET,
    SETS,
    STORAGE,
    Probe,
    Scope,
)

if TYPE_CHECKING:
    from slurm_health.preflight.session.phases import Phase

OFF = "off"
# Run by an interpreter: exits with 0 if it has torch, else with 1, without loading it.
FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_GROUP = "slurm_health.probes"


def chosen_phases(value: str, option: str = "--check") -> tuple[Phase, ...]:
    """Return the phases that a comma-separated list asks for.

    Raises:
        ConfigError: an item is no set, no probe, and no program that can be run.
    """
    from slurm_health.preflight.session.phases import (
        phases,  # commands that check nothing do without
    )

    items = [item.strip() for item in value.split(",") if item.strip()]
    if not items:
        valid = ", ".join([*SETS, OFF])
        raise ConfigError(option, repr(value), f"names nothing to check; valid: {valid}")
    if OFF in items:
        raise ConfigError(option, OFF, "stands alone, and only sbatch takes it")
    named = [item for item in items if "/" not in item]
    programs = _programs([item for item in items if "/" in item], named, option)
    foreign = {*named} - {probe.name for probe in BUILT_IN} - SETS.keys()
    own = [*(_installed(name, option) for name in sorted(foreign)), *programs]
    return phases([*named, *(probe.name for probe in programs)], own)


def what_to_check(settings: Mapping[str, object]) -> str:
    """Return the value of `check`, with the flags beside it."""
    named = settings.get("check")
    if named == OFF:
        return OFF
    flags = [
        name
        for name in ("network-check", "straggler-detection")
        if settings.get(name.replace("-", "_"))
    ]
    return ",".join([*([str(named)] if named else []), *flags]) or DEFAULT


def asks_for_light(value: str) -> bool:
    """Return whether a list asks for light probes, or for nothing that needs others."""
    items = {item.strip() for item in value.split(",")}
    return LIGHT_SET in items or items == {STORAGE}


def why_light(value: str) -> str:
    """Return why light probes measure, empty if a list does not ask for them."""
    if not asks_for_light(value):
        return ""
    return f"--check={LIGHT_SET if LIGHT_SET in value else STORAGE}"


def spelled_out(value: str, option: str) -> str:
    """Return the list with programs by their absolute paths, after checking every item.

    Raises:
        ConfigError: as for `chosen_phases`.
    """
    chosen_phases(value, option)
    items = [item.strip() for item in value.split(",") if item.strip()]
    return ",".join(str(_absolute(item)) if "/" in item else item for item in items)


def _programs(paths: Iterable[str], named: Iterable[str], option: str) -> list[Probe]:
    """Return programs as probes under their own names, beside those `named`.

    Raises:
        ConfigError: one of them cannot be run, or has the name of another probe.
    """
    taken = {probe.name for probe in BUILT_IN} | SETS.keys() | {*named}
    programs = []
    for path, given in {_absolute(path): path for path in paths}.items():
        if not os.access(path, os.X_OK) or not path.is_file():
            raise ConfigError(option, given, "is not a program that can be run here")
        if path.name in taken:
            problem = f"is named like the probe {path.name}; give it another name"
            raise ConfigError(option, given, problem)
        taken.add(path.name)
        programs.append(Probe(path.name, Scope.SOLO, str(path)))
    return programs


def _absolute(path: str) -> Path:
    """Return the path of a program. A link is not followed: its name may select what it does."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - pathlib leaves `..` in place


def _installed(name: str, option: str) -> Probe:
    """Return the probe of another package.

    Raises:
        ConfigError: there is none of that name, or its file is unknown.
    """
    # Loaded for such a probe only: it is a quarter of what a check loads at first.
    from importlib.metadata import entry_points

    for scope in Scope:
        for point in entry_points(group=f"{_GROUP}.{scope.value}", name=name):
            try:
                spec = importlib.util.find_spec(point.module)
            except (ImportError, ValueError) as err:
                raise ConfigError(option, name, f"{point.module} cannot be loaded: {err}") from err
            if spec is None or not spec.origin or not spec.origin.endswith(".py"):
                raise ConfigError(option, name, f"{point.module} is not a module of a single file")
            return Probe(name, scope, spec.origin)
    foreign = [p.name for scope in Scope for p in entry_points(group=f"{_GROUP}.{scope.value}")]
    valid = [*SETS, OFF, *(probe.name for probe in BUILT_IN), *sorted(foreign)]
    raise ConfigError(option, name, "no such probe", valid=valid)
