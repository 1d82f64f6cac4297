# SPDX-License-Identifier: Apache-2.0
"""Imports point down the house, and what decides touches nothing."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

import slurm_health

PACKAGE = Path(slurm_health.__file__).parent
NAME = "slurm_health"
MODULES = {
    ".".join([NAME, *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PURE_MAY_IMPORT = {"msgspec"}
# What would let a decision reach the world.
IMPURE = {
    "asyncio",
    "click",
    "filelock",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "requests",
    "secrets",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
}
NUMPY_USERS = (f"{NAME}.preflight.localize.", f"{NAME}.preflight.probes.light_compute")
# The house from the ground up: each quarter with its rooms, row by row. A room imports itself, the
# rows below its own in its quarter, and the quarters below: never a quarter above, never another
# room of its row. A module that is no room of its own belongs to the room around it.
HOUSE: dict[str, tuple[tuple[str, ...], ...]] = {
    "records": (),
    "system": (
        ("proc", "signals"),
        ("killable", "nvml", "private_files", "processes", "site_file", "telemetry"),
        ("journal", "slurm", "templates"),
    ),
    "node": (
        ("rules",),
        ("checks",),
        ("passes", "site_settings"),
        ("notify",),
        ("draining",),
        ("mending",),
        ("hooks",),
        ("doctor",),
    ),
    "preflight": (
        ("expectations", "order_lines", "probes"),
        ("decide", "localize"),
        ("session",),
        ("config", "orders"),
        ("option_kinds",),
        ("options",),
        ("acting", "agent", "sbatch", "supervisor"),
        ("by_default", "master"),
    ),
    "report": (),
    "training": (("diagnosis",), ("plugins",), ("monitor",), ("restart",), ("in_ranks",)),
    "fleet": (("standing",), ("history", "retention"), ("sweep",)),
    "torchrun": (),
    "cli": (),
}
# Beside the quarters: what users import.
AT_THE_TOP = ("heartbeat",)
ROWS: tuple[tuple[str, ...], ...] = (
    AT_THE_TOP,
    *(
        tuple(f"{quarter}.{room}" for room in row)
        for quarter, rows in HOUSE.items()
        for row in rows
    ),
)
# What only decides: no files, clock, environment, network or logging; randomness from a given seed.
PURE_ROOMS = (
    "records",
    "node.rules",
    "preflight.decide",
    "preflight.expectations",
    "preflight.localize",
    "preflight.order_lines",
    "preflight.session",
    "training.diagnosis",
    "training.plugins.data",
    "training.plugins.diagnosticians",
    "training.plugins.operators",
    "fleet.retention.rules",
    "fleet.standing",
    "fleet.sweep.choice",
)
ERRORS = f"{NAME}.records.errors"  # which may carry a path
PURE = [
    module
    for module in MODULES
    if f"{module}.".startswith(tuple(f"{NAME}.{each}." for each in PURE_ROOMS)) and module != ERRORS
]
# The only modules that load these.
ONLY_IN = {
    "apprise": f"{NAME}.node.notify",
    "jinja2": f"{NAME}.report.web_page",
    "pyslurm": f"{NAME}.system.slurm.reads",
    "torch": f"{NAME}.preflight.probes",
}


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Return the full names a module imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in MODULES else node.module)
    return frozenset(names)


def top(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return which of our modules each of our modules imports when it is loaded or used."""
    return {
        module: {name for name in imported(module) if name in MODULES and name != module}
        for module in MODULES
    }


def room(module: str) -> str:
    """Return the room a module stands in: the quarter itself for one that has no room."""
    inside = module.removeprefix(NAME).removeprefix(".")
    rooms = [*AT_THE_TOP, *HOUSE, *(each for row in ROWS for each in row)]
    fitting = [each for each in rooms if f"{inside}.".startswith(f"{each}.")]
    return max(fitting, key=len, default="")


def floor(room: str) -> tuple[int, int]:
    """Return the number of a room's quarter, and of its row there."""
    quarter, _, inside = room.partition(".")
    if quarter not in HOUSE:
        return -1, 0
    rows = [number for number, row in enumerate(HOUSE[quarter]) if inside in row]
    return list(HOUSE).index(quarter), rows[0] if rows else -1


def test_every_module_stands_in_a_room() -> None:
    assert {m for m in MODULES if not room(m)} == {NAME, f"{NAME}.__main__"}


@pytest.mark.parametrize("module", [m for m in MODULES if room(m)])
def test_a_room_imports_only_what_stands_below_it(module: str) -> None:
    own = room(module)
    for name in sorted(graph()[module] - {NAME}):
        assert room(name) == own or floor(room(name)) < floor(own), name


@pytest.mark.parametrize("module", PURE)
def test_what_decides_imports_nothing_that_touches_the_world(module: str) -> None:
    for name in imported(module):
        if top(name) == NAME:
            assert name in {NAME, ERRORS, *PURE}, name
        elif top(name) == "numpy":
            assert module.startswith(NUMPY_USERS), name
        else:
            assert top(name) in sys.stdlib_module_names | PURE_MAY_IMPORT, name
            assert top(name) not in IMPURE, name


@pytest.mark.parametrize("module", PURE)
def test_what_decides_opens_and_prints_nothing(module: str) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert not called & {"open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_and_delicate_packages_are_imported_in_one_place_only(package: str) -> None:
    users = {module for module in MODULES if package in {top(name) for name in imported(module)}}

    assert all(module.startswith(ONLY_IN[package]) for module in users)


def test_numpy_is_imported_by_the_localizer_the_planner_and_light_probes_only() -> None:
    users = {module for module in MODULES if "numpy" in {top(name) for name in imported(module)}}

    assert all(module.startswith(NUMPY_USERS) for module in users)


def test_no_module_is_named_after_one_of_the_standard_library() -> None:
    names = {part for module in MODULES for part in module.split(".")}

    assert not names & (sys.stdlib_module_names - {"__main__"})


def test_imports_go_round_in_no_circle() -> None:
    imports = graph()
    while imports:
        free = {module for module, needed in imports.items() if not needed & imports.keys()}
        assert free, f"a circle among {imports}"
        imports = {module: needed for module, needed in imports.items() if module not in free}


def test_nothing_is_run_through_a_shell() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                pytest.fail(f"{module}: line {node.value.lineno}")


# Besides the one place: a hook has no time to load that one; what a check of a node or a probe runs
# ends with it, and probes are run by an interpreter that has nothing of ours.
STARTERS = {"system.processes", "system.killable", "node.checks.external"}
STARTING = {"subprocess", "os.fork", "os.posix_spawn", "multiprocessing", "asyncio"}


def test_processes_are_started_in_one_place() -> None:
    users = set()
    for module, path in MODULES.items():
        names = {top(name) for name in imported(module)}
        names |= {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        if names & STARTING and room(module) != "preflight.probes":
            users.add(module.removeprefix(f"{NAME}."))
    assert users == STARTERS


# A longer module has a second topic, and further arguments belong into an object of their own.
MOST_LINES, MOST_ARGUMENTS = 400, 7


def test_no_module_has_more_than_400_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}

    assert not {module: lines for module, lines in lengths.items() if lines > MOST_LINES}


def test_no_function_takes_more_than_seven_arguments() -> None:
    too_many = [
        f"{module}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and _arguments(node) > MOST_ARGUMENTS
    ]

    assert not too_many


def _arguments(function: ast.FunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])
