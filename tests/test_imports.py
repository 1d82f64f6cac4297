# SPDX-License-Identifier: Apache-2.0
"""What lives on every node, or for days, loads little; and importing does nothing but import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "pyslurm"}
LIGHT = {
    "the command line": "slurm_health.cli.main",
    "the report": (
        "slurm_health.report.read, slurm_health.report.table, slurm_health.report.export"
    ),
    "the agent": "slurm_health.preflight.agent.agent, slurm_health.preflight.agent.worker_process",
    "the supervisor": "slurm_health.preflight.supervisor.supervisor",
    "the check before its first round": (
        "slurm_health.cli.check, slurm_health.preflight.master.run_check"
    ),
    "the monitor of a node": "slurm_health.training.monitor.node",
    "the watch before there is a heartbeat": "slurm_health.training.monitor.beside",
    "the heartbeat": "slurm_health.heartbeat",
    "the requeue helper": "slurm_health.preflight.acting.release_elsewhere",
}
# Prints which files were opened, which sockets made and which processes started by an import.
WATCH = """
import sys
seen = []
def hook(event, args):
    if event in {"subprocess.Popen", "os.fork", "socket.__new__"}:
        seen.append(event)
    elif event == "open":
        name = str(args[0])
        if not name.endswith((".py", ".pyc", ".so", ".pth")) and ".so." not in name:
            seen.append(name)
sys.addaudithook(hook)
import MODULES
import logging
print(*seen, sep="\\n")
print("handlers:", logging.getLogger().handlers, logging.getLogger("slurm_health").handlers)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("modules", LIGHT.values(), ids=LIGHT)
def test_it_loads_neither_torch_nor_numpy(modules: str) -> None:
    loaded = run(f"import sys, {modules}; print(*sys.modules)").split()

    assert not {name.partition(".")[0] for name in loaded} & HEAVY


@pytest.mark.parametrize("module", ["main", "agent", "check"])
def test_what_each_check_starts_loads_nothing_that_few_checks_need(module: str) -> None:
    loaded = run(f"import sys, slurm_health.cli.{module}; print(*sys.modules)").split()

    assert not {"filelock", "difflib"} & set(loaded)
    assert not {name for name in loaded if name.startswith("slurm_health.system.slurm.client")}
    assert "slurm_health.preflight.session.gpt_sizing" not in loaded


def test_the_supervisor_which_lives_for_days_loads_no_command_line() -> None:
    loaded = run(
        "import sys, slurm_health.preflight.supervisor.supervisor; print(*sys.modules)"
    ).split()

    assert not {name.partition(".")[0] for name in loaded} & {"click", "tabulate"}


@pytest.mark.parametrize("modules", LIGHT.values(), ids=LIGHT)
def test_importing_it_opens_nothing_but_modules_and_configures_no_logging(modules: str) -> None:
    *opened, handlers = run(WATCH.replace("MODULES", modules)).splitlines()

    assert handlers == "handlers: [] []"
    assert [name for name in opened if name and not _is_of_python(name)] == []


def test_the_command_line_is_there_in_a_moment() -> None:
    """Help must not cost what a check costs; the limit is generous for a busy machine."""
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "slurm_health", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environ,
    )

    assert "slurm_health.preflight.localize.localizer" not in done.stderr


def _is_of_python(name: str) -> bool:
    """Tell files that belong to the interpreter."""
    path = Path(name)
    return name.isdigit() or path.is_relative_to(sys.base_prefix) or path.is_dir()
