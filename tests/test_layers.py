# SPDX-License-Identifier: Apache-2.0
"""Imports point towards the core, and the core touches nothing."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
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
CORE = [module for module in MODULES if module.startswith(f"{NAME}.core")]
CORE_MAY_IMPORT = {"msgspec", "ClusterShell"}
# What would let the core reach the world.
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
NUMPY_USERS = f"{NAME}.core.localize."
# Who may import whom: a room imports itself and the rows above its own, never a row below and never
# another room of its row. A package that is no room of its own belongs to the room around it.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "private_files", "probes", "heartbeat"),
    ("core",),
    ("core.localize", "core.acting", "core.node"),
    ("core.diagnosis",),
    ("core.session",),
    ("core.history",),
    (
        "processes",
        "killable",
        "nvml",
        "journal",
        "machine_log",
        "site_file",
        "probe_choice",
        "shipped",
    ),
    ("slurm", "checks", "config", "orders", "bell"),
    ("site_settings", "options", "stuck", "templates"),
    ("draining",),
    ("agent", "acting", "supervisor", "sbatch", "report", "hooks", "monitor"),
    ("master", "doctor", "history", "retention"),
    ("torchrun", "restart", "sweep"),
    ("cli",),
)
# The only modules that load these.
ONLY_IN = {
    "grpc": f"{NAME}.hooks.serve",
    "jinja2": f"{NAME}.report.web_page",
    "pyslurm": f"{NAME}.slurm.pyslurm_client",
    "torch": f"{NAME}.probes",
}


def imported(module: str) -> Iterator[str]:
    """Yield the full names a module imports anywhere in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


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
    """Return the room a module stands in."""
    inside = module.removeprefix(NAME).removeprefix(".")
    fitting = [each for row in ROWS for each in row if f"{inside}.".startswith(f"{each}.")]
    return max(fitting, key=len, default="")


def row_of(room: str) -> int:
    return next(number for number, row in enumerate(ROWS) if room in row)


def test_every_module_stands_in_a_room() -> None:
    assert {m for m in MODULES if not room(m)} == {NAME, f"{NAME}.__main__"}


@pytest.mark.parametrize("module", [m for m in MODULES if room(m)])
def test_a_room_imports_only_what_stands_above_it(module: str) -> None:
    own = room(module)
    for name in sorted(graph()[module] - {NAME}):
        assert room(name) == own or row_of(room(name)) < row_of(own), name


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_nothing_that_touches_the_world(module: str) -> None:
    for name in imported(module):
        if top(name) == NAME:
            assert name.startswith((f"{NAME}.core", f"{NAME}.errors")), name
        elif top(name) == "numpy":
            assert module.startswith(NUMPY_USERS), name
        else:
            assert top(name) in sys.stdlib_module_names | CORE_MAY_IMPORT, name
            assert top(name) not in IMPURE, name


@pytest.mark.parametrize("module", CORE)
def test_the_core_opens_and_prints_nothing(module: str) -> None:
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


def test_numpy_is_imported_by_the_localizer_and_the_planner_only() -> None:
    users = {module for module in MODULES if "numpy" in {top(name) for name in imported(module)}}

    assert all(module.startswith(NUMPY_USERS) for module in users)


def test_no_module_is_named_after_one_of_the_standard_library() -> None:
    names = {part for module in MODULES for part in module.split(".")}

    assert not names & (sys.stdlib_module_names - {"__main__"})


def test_imports_go_round_in_no_circle() -> None:
    imports = graph()
    order: list[str] = []
    while len(order) < len(imports):
        free = [m for m in imports if m not in order and imports[m] <= set(order)]
        stuck = {m: imports[m] - set(order) for m in imports if m not in order}
        assert free, f"a circle among {stuck}"
        order += free


def test_nothing_is_run_through_a_shell() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                pytest.fail(f"{module}: line {node.value.lineno}")


# Besides the one place: a hook has no time to load that one; what a check of a node or a probe runs
# ends with it, and probes are run by an interpreter that has nothing of ours.
STARTERS = {"processes", "killable", "checks.external"}
STARTING = {"subprocess", "os.fork", "os.posix_spawn", "multiprocessing", "asyncio"}


def test_processes_are_started_in_one_place() -> None:
    users = set()
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        names = {top(name) for name in imported(module)}
        names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if names & STARTING and room(module) != "probes":
            users.add(module.removeprefix(f"{NAME}."))
    assert users == STARTERS
