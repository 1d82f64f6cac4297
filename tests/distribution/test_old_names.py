# SPDX-License-Identifier: Apache-2.0
"""A package that is replaced under processes that began before its modules moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slurm_health.aliases import LATE, MOVED
from tests.support import installations
from tests.test_layers import MODULES, NAME, PACKAGE

pytest.importorskip("hatchling")
# Loads what such a process has loaded, and then, once the package has been replaced, some more.
BEGAN = """
import importlib, sys
{loads}
print(flush=True)
sys.stdin.readline()
from slurm_health.{module} import {name}
print("found", {shown})
"""
WORKER = """
import sys
import slurm_health
print(flush=True)
sys.stdin.readline()
try:
    from slurm_health.probes.context import ProbeContext
except Exception:
    print("caught")
"""
BEGINS_AGAIN = """
import os, sys
from importlib.machinery import ModuleSpec
if "BEGAN" in os.environ:
    sys.exit(print("as before"))
import slurm_health
os.environ["BEGAN"] = "once"
sys.modules["__main__"].__spec__ = ModuleSpec("slurm_health.{program}", None)
print(flush=True)
sys.stdin.readline()
import slurm_health.monitor.findings
"""


class Before:
    """A directory with the release before the move, until it is replaced by today's."""

    def __init__(self, directory: Path) -> None:
        source = directory / "source"
        if reason := installations.source_of(installations.BEFORE_QUARTERS, source):
            pytest.skip(reason)
        self._before = installations.wheel(directory / "wheel-before", source)
        self._today = installations.wheel(directory / "wheel-today")
        self._site = directory / "site"
        self.package = self._site / NAME

    def replace(self) -> None:
        """Let it be today's."""
        self._unpack(self._today)

    def run(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a Python program; replace its package once it has written a line, and tell it so."""
        self._unpack(self._before)
        with subprocess.Popen(
            [sys.executable, "-P", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self._site)},
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            self.replace()
            out, err = process.communicate("\n", timeout=60)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def _unpack(self, wheel: Path) -> None:
        shutil.rmtree(self._site, ignore_errors=True)
        with zipfile.ZipFile(wheel) as files:
            files.extractall(self._site)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    return Before(tmp_path_factory.mktemp("before"))


@pytest.mark.heavy
@pytest.mark.parametrize("late", LATE)
def test_a_supervisor_that_began_before_loads_the_rest_of_itself(before: Before, late: str) -> None:
    package, _, module = late.rpartition(".")
    code = BEGAN.format(
        loads="import slurm_health.supervisor.supervisor",
        module=package,
        name=module,
        shown=f"{module}.{LATE[late][0]}",
    )
    done = before.run("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("found ")


def test_any_other_process_that_began_before_is_told_that_it_was_replaced(before: Before) -> None:
    code = BEGAN.format(loads="import slurm_health", module="hooks.epilog", name="run", shown="run")
    done = before.run("-c", code)
    assert done.returncode == 1
    assert "ImportError: slurm-health was replaced while this process ran" in done.stderr


def test_a_worker_that_began_before_ends_whatever_it_catches(
    before: Before, tmp_path: Path
) -> None:
    worker = tmp_path / "probes" / "worker.py"
    worker.parent.mkdir()
    worker.write_text(WORKER)
    done = before.run(worker)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "slurm-health was replaced while this process ran\n"


@pytest.mark.parametrize("program", ["monitor.beside", "monitor.batch_node"])
def test_a_process_with_nothing_to_lose_begins_again(before: Before, program: str) -> None:
    done = before.run("-c", BEGINS_AGAIN.format(program=program))
    assert (done.returncode, done.stdout) == (0, "as before\n"), done


def test_a_wheel_has_a_file_at_every_old_name_and_each_module_of_today(before: Before) -> None:
    before.replace()
    package = before.package
    for old in MOVED:
        place = package / old.replace(".", "/")
        assert place.with_suffix(".py").exists() != (place / "__init__.py").exists(), old
    for path in MODULES.values():
        assert (package / path.relative_to(PACKAGE)).read_text() == path.read_text()


@pytest.mark.parametrize("program", ["worker", "torchrun_arguments", "torchrun_restarts"])
def test_a_program_at_an_old_path_is_that_of_today(before: Before, program: str) -> None:
    before.replace()
    today = before.package / "preflight" / "probes" / f"{program}.py"
    today.write_text("import sys; print(__file__, *sys.argv[1:])")
    old = before.package / "probes" / f"{program}.py"
    argv: list[str | Path] = [sys.executable, old, "a word", "more"]
    assert subprocess.check_output(argv, text=True) == f"{today} a word more\n"
