# SPDX-License-Identifier: Apache-2.0
"""The Ansible role on this machine, in directories of its own: what it must leave alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.supervised import write_executable

ROLE = Path(__file__).parents[2] / "distribution/ansible"
PLAYBOOK = shutil.which(
    "ansible-playbook", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PLAYBOOK is None, reason="ansible-playbook is not installed"),
]


def play(tmp_path: Path, playbook: str, **settings: object) -> str:
    """Run a playbook for one node, this machine, whose Slurm has no hooks; return what was said."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    write_executable(tmp_path / "bin/scontrol", "#!/bin/sh\necho 'Prolog = (null)'\n")
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = {
        "slurm_health_nodes": {"hosts": {"here": {**host, "ansible_become": False, **settings}}},
        "slurm_health_controller": {"hosts": {}},
    }
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    environ = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "ANSIBLE_HOME": str(tmp_path / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
    }
    words = [str(PLAYBOOK), "-i", str(tmp_path / "inventory.json"), str(ROLE / playbook)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def lay_out(tmp_path: Path) -> dict[str, object]:
    """Lay out an installation, with files of the site's own beside it; return its settings."""
    etc, home, state = tmp_path / "etc", tmp_path / "home", tmp_path / "state"
    for path in (
        etc / "config.toml",
        etc / "prolog/slurm-health",
        etc / "prolog/slurm-health-healthcheck",
        etc / "epilog/slurm-health",
        etc / "epilog/slurm-health-unkillable",
        home / "wheels/installed",
        home / "bin/slurm-health",
        state / "last.json",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return {
        "slurm_health_etc": str(etc),
        "slurm_health_home": str(home),
        "slurm_health_kept": [str(state)],
        "slurm_health_wheels": ["one.whl"],
    }


def test_what_the_site_has_beside_it_stays(tmp_path: Path) -> None:
    settings = lay_out(tmp_path)
    own = [tmp_path / "etc/slurm.conf", tmp_path / "etc/prolog/90-site"]
    for path in own:
        path.touch()

    said = play(tmp_path, "uninstall.yml", **settings)

    assert all(path.exists() for path in own), said
    assert not (tmp_path / "etc/prolog/slurm-health").exists()
    assert not (tmp_path / "etc/config.toml").exists()
    assert "90-site" in said


def test_an_environment_that_the_role_has_not_made_is_neither_used_nor_removed(
    tmp_path: Path,
) -> None:
    settings = lay_out(tmp_path)
    shutil.rmtree(tmp_path / "home/wheels")
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "one.whl").touch()
    given = {
        "slurm_health_config": str(tmp_path / "config.toml"),
        "slurm_health_wheels": [str(tmp_path / "one.whl")],
    }

    refused = play(tmp_path, "install.yml", **{**settings, **given})
    assert "is not slurm-health's alone" in refused
    assert not (tmp_path / "home/wheels").exists()

    play(tmp_path, "uninstall.yml", **settings)
    assert (tmp_path / "home/bin/slurm-health").exists()
