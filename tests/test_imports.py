# SPDX-License-Identifier: Apache-2.0
"""What lives on every node, or for days, loads little; and importing does nothing but import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "pyslurm")
# What few checks need: none of it is loaded by what each check starts.
SELDOM = (
    "filelock",
    "difflib",
    "slurm_health.preflight.localize.localizer",
    "slurm_health.system.slurm.client",
)


# By what it is: the modules that one process loads when it starts, and what that must not load.
LIGHT = {
    "the command line": ("slurm_health.cli.main", (*HEAVY, *SELDOM)),
    "the command of a check": ("slurm_health.cli.check", (*HEAVY, *SELDOM)),
    "the command of an agent": ("slurm_health.cli.agent", (*HEAVY, *SELDOM)),
    "run, which lives as long as a training": ("slurm_health.torchrun.train", HEAVY),
    "the report": (
        "slurm_health.report.read, slurm_health.report.text, slurm_health.report.export",
        (*HEAVY, "click"),
    ),
    "the agent": (
        "slurm_health.preflight.agent.agent, slurm_health.preflight.agent.worker_process",
        HEAVY,
    ),
    "the supervisor, which lives for days": (
        "slurm_health.preflight.supervisor.supervisor",
        (*HEAVY, "click", "tabulate"),
    ),
    "the check before its first round": (
        "slurm_health.cli.check, slurm_health.preflight.master.run_check",
        HEAVY,
    ),
    "the agent of a node": ("slurm_health.training.monitor.agent", HEAVY),
    "the watch before it starts agents": ("slurm_health.training.monitor.watch", HEAVY),
    "the heartbeat": ("slurm_health.heartbeat", HEAVY),
    "the requeue helper": ("slurm_health.preflight.acting.release_elsewhere", HEAVY),
}
# Prints what an import loaded, opened and configured, which sockets it made and which processes it
# started.
WATCH = """
import json, sys
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
loaded = list(sys.modules)
import logging
handlers = logging.getLogger().handlers + logging.getLogger("slurm_health").handlers
print(json.dumps({"seen": seen, "loaded": loaded, "handlers": len(handlers)}))
"""


@pytest.mark.parametrize(("modules", "without"), LIGHT.values(), ids=LIGHT)
def test_it_loads_nothing_heavy_opens_nothing_but_modules_and_configures_no_logging(
    modules: str, without: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCH.replace("MODULES", modules)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)

    assert done.stderr == ""
    unwanted = tuple(f"{name}." for name in without)
    assert [name for name in found["loaded"] if f"{name}.".startswith(unwanted)] == []
    assert [name for name in found["seen"] if name and not _is_of_python(name)] == []
    assert found["handlers"] == 0


def _is_of_python(name: str) -> bool:
    """Tell files that belong to the interpreter."""
    path = Path(name)
    return name.isdigit() or path.is_relative_to(sys.base_prefix) or path.is_dir()
