# SPDX-License-Identifier: Apache-2.0
"""Every module is found by the name that it had before the house had quarters."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.aliases import LATE, MOVED, new_name
from tests.test_layers import MODULES, NAME

# What installed shims, running jobs and a site's own plugins name.
PROGRAMS = ("hooks", "monitor", "monitor.node", "monitor.beside", "monitor.batch_node")
DOCUMENTED = {
    "core.localize": "Localizer",
    "probes.context": "ProbeContext",
    "checks.check": "Unmeasured",
    "monitor.collector": "DataCollector",
    "core.diagnosis.inference": "InferenceOperator",
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_that_it_became(old: str) -> None:
    assert f"{NAME}.{MOVED[old]}" in MODULES
    new = importlib.import_module(f"{NAME}.{MOVED[old]}")
    assert importlib.import_module(f"{NAME}.{old}") is new
    assert new.__name__ == f"{NAME}.{MOVED[old]}"
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__


@pytest.mark.parametrize("old", [old for old in MOVED if "." in old])
def test_a_module_is_found_in_the_package_that_it_was_in(old: str) -> None:
    package, _, module = old.rpartition(".")
    found: dict[str, object] = {}
    exec(f"from {NAME}.{package} import {module} as module", found)
    assert found["module"] is importlib.import_module(f"{NAME}.{MOVED[old]}")


def test_no_old_name_hides_a_module_of_today() -> None:
    assert {module for module in MODULES if new_name(module) not in (None, module)} == set()


@pytest.mark.parametrize(("old", "attribute"), DOCUMENTED.items())
def test_what_plugins_were_told_to_import_is_there(old: str, attribute: str) -> None:
    if old.startswith("probes"):
        pytest.importorskip("torch")
    assert hasattr(importlib.import_module(f"{NAME}.{old}"), attribute)


def test_both_names_have_the_same_types_whichever_is_loaded_first() -> None:
    code = (
        "from slurm_health.core.records import RoundStarted as old\n"
        "from slurm_health.records.records import RoundStarted as new\n"
        "from slurm_health.core import nodeset\n"
        "import slurm_health.records.nodeset as now\n"
        "assert old is new and nodeset is now"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_an_old_name_runs(program: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", f"{NAME}.{program}", "--no-such-option"]
    environ = {**os.environ, "SLURM_HEALTH_CONFIG": str(tmp_path / "none.toml")}
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        env=environ,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert "No module named" not in done.stderr
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.parametrize("old", LATE)
def test_what_a_supervisor_of_before_loads_late_stands_where_the_table_says(old: str) -> None:
    _, place, today = LATE[old]
    assert hasattr(importlib.import_module(f"{NAME}.{place}"), today)
