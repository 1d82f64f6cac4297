# SPDX-License-Identifier: Apache-2.0
"""The shims under an empty environment: their own errors never fail a prolog or an epilog."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_health.node.doctor import slurm_conf
from tests.support.sites import write_site
from tests.support.supervised import eventually, write_executable

ROOT = Path(__file__).parents[2]
SHIMS = [
    "prolog/slurm-health",
    "epilog/slurm-health",
    "prolog/slurm-health-healthcheck",
    "epilog/slurm-health-unkillable",
]
ENV = shutil.which("env") or "/usr/bin/env"


def install(
    directory: Path, shim: str, *, python: str, config: Path, limit: str = "30", slurm: str = "/"
) -> Path:
    """Install a shim as the documentation says: copy it and edit its lines."""
    text = (ROOT / shim).read_text()
    edits = {"python": python, "config": str(config), "limit": limit, "slurm": slurm}
    for name, value in edits.items():
        text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert count == 1
    return write_executable(directory / Path(shim).name, text)


def stub(directory: Path, text: str) -> str:
    return str(write_executable(directory / "python", f"#!/bin/sh\n{text}\n"))


def run(shim: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ENV, "-i", str(shim)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("shim", SHIMS)
def test_on_a_well_node_it_ends_with_0_and_says_nothing(tmp_path: Path, shim: str) -> None:
    state = f"[hooks]\nstate = '{tmp_path}/state'\n"
    config = write_site(tmp_path / "etc", f"{state}[checks.memory]\n")
    ran = run(install(tmp_path, shim, python=sys.executable, config=config))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(("shim", "code"), [(SHIMS[0], 1), (SHIMS[1], 1), (SHIMS[2], 0)])
def test_a_proven_fault_fails_prolog_and_epilog_and_no_health_check(
    tmp_path: Path, shim: str, code: int
) -> None:
    python = stub(tmp_path, "exit 99")
    ran = run(install(tmp_path, shim, python=python, config=tmp_path))
    assert (ran.returncode, ran.stderr) == (code, "")


@pytest.mark.parametrize("shim", SHIMS)
def test_slurms_commands_are_looked_for_where_the_shim_says(tmp_path: Path, shim: str) -> None:
    write_executable(tmp_path / "scontrol", "#!/bin/sh\necho mine >&2\n")
    python = stub(tmp_path, "scontrol")
    ran = run(install(tmp_path, shim, python=python, config=tmp_path, slurm=str(tmp_path)))
    assert ran.stderr == "mine\n"


@pytest.mark.parametrize("shim", SHIMS)
def test_unedited_a_shim_looks_where_slurm_is_often_installed(shim: str) -> None:
    found = slurm_conf.read_shim(ROOT / shim)
    assert found is not None
    assert {"/opt/slurm/bin", "/usr/local/bin", "/usr/bin"} <= set(found.search_path.split(":"))


@pytest.mark.parametrize("shim", SHIMS)
@pytest.mark.parametrize(
    "text",
    [
        "exit 1",  # what Python ends with after a traceback
        "exit 2",
        "exit 70",
        "exit 126",
        "exec /nowhere/python",  # 127
        "kill -SEGV $$",
        "kill -KILL $$",
        "echo noise; echo noise >&2; exit 3",
    ],
)
def test_its_own_error_ends_with_0_and_is_told(tmp_path: Path, shim: str, text: str) -> None:
    ran = run(install(tmp_path, shim, python=stub(tmp_path, text), config=tmp_path))
    assert ran.returncode == 0
    # With the colon the system log knows whose line it is.
    assert re.search(r"^slurm-health: \w+: this node was not checked \(code ", ran.stderr, re.M)


@pytest.mark.parametrize("shim", SHIMS)
@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("[checks.memry]\n", 0o644, ""),
        ("[[[", 0o644, ""),
        ("[checks.memory]\nmin_total_gib=-1\n", 0o644, ""),
        ("[checks.memory]\n", 0o666, "can be written by others"),
    ],
)
def test_a_configuration_that_is_not_followed_ends_with_0_and_is_told(
    tmp_path: Path, shim: str, text: str, mode: int, said: str
) -> None:
    config = write_site(tmp_path / "etc", text)
    config.chmod(mode)
    ran = run(install(tmp_path, shim, python=sys.executable, config=config))
    assert ran.returncode == 0
    assert str(config) in ran.stderr
    assert said in ran.stderr


@pytest.mark.parametrize("shim", SHIMS)
def test_a_hook_that_never_ends_is_ended_at_the_limit(tmp_path: Path, shim: str) -> None:
    python = stub(tmp_path, "exec sleep 3600")
    began = time.monotonic()
    ran = run(install(tmp_path, shim, python=python, config=tmp_path, limit="1"))
    assert time.monotonic() - began < 60
    assert ran.returncode == 0
    assert "not checked (code 124)" in ran.stderr


def test_slurmds_signal_reaches_the_hook_and_its_children(tmp_path: Path) -> None:
    """slurmd signals the process group, and a moment later kills it."""
    note = tmp_path / "pid"
    program = stub(tmp_path, f"echo $$ >{note}; exec sleep 3600")
    state = f"[hooks]\nstate = '{tmp_path}/state'\n"
    config = write_site(
        tmp_path / "etc",
        f"{state}[checks.hung]\ncheck='command'\nargv=['{program}']\ntime_limit_s=600\n",
    )
    shim = install(tmp_path, SHIMS[0], python=sys.executable, config=config, limit="600")
    hook = subprocess.Popen([ENV, "-i", str(shim)], start_new_session=True)
    eventually(lambda: note.exists() and note.read_text().strip(), "the check")
    os.killpg(hook.pid, signal.SIGTERM)
    hook.wait(10)
    child = Path(f"/proc/{note.read_text().strip()}/cmdline")
    eventually(lambda: not child.exists() or not child.read_bytes(), "the end of what it started")
