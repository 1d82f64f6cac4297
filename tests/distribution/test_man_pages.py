# SPDX-License-Identifier: Apache-2.0
"""A man page for each command, as programs that show such pages read it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distribution import completion, man_pages
from tests.support.command_line import slurm_health

PAGES = man_pages.pages()


def shown(name: str) -> str:
    """Return a page as groff shows it, which says nothing against it."""
    words = ["groff", "-man", "-Tascii", "-P-cbou", "-ww", "-rLL=100n"]
    done = subprocess.run(words, input=PAGES[name], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_there_is_one_for_each_command_that_is_listed() -> None:
    listed = slurm_health("--help").stdout.split("For a job:")[1]
    lines = [line for line in listed.splitlines() if line[:2] == "  "]
    commands = {line.split()[0] for line in lines if line[2:3].strip()}

    assert {f"slurm-health-{name}.1" for name in commands} < set(PAGES)
    assert {"slurm-health.1", "slurm-health-nodes-release.1"} < set(PAGES)
    assert "slurm-health-agent.1" not in PAGES


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="no mandoc here: apt-get install mandoc")
def test_mandoc_finds_no_mistake_in_them(tmp_path: Path) -> None:
    for name, text in PAGES.items():
        (tmp_path / name).write_text(text)

    words = ["mandoc", "-T", "lint", "-W", "error", *map(str, tmp_path.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(
    shutil.which("groff") is None, reason="no groff here: apt-get install groff-base"
)
def test_they_show_what_help_says() -> None:
    page = shown("slurm-health-history.1")
    assert "slurm-health-history - Print what all checks have found on a node" in page
    assert "slurm-health history [OPTIONS] NODE" in page
    assert "       --rebuild\n              Read all journals anew." in page
    assert "slurm-health(1)" in page
    assert "           srun --ntasks-per-node=1 slurm-health run --network-check \\\n" in shown(
        "slurm-health-run.1"
    )
    assert "  --spares=" in shown("slurm-health-sbatch.1")  # which has a parser of its own


def test_each_shell_finds_its_completion_below_share() -> None:
    files = completion.files()
    for shell, (path, text) in zip(("bash", "zsh", "fish"), files.items(), strict=True):
        assert path.startswith(shell)
        assert text == slurm_health("completion", shell).stdout
