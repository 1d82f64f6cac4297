# SPDX-License-Identifier: Apache-2.0

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.preflight.sbatch.arguments import (
    LONG,
    CommandLine,
    Value,
    listed_options,
    parse,
)
from slurm_health.records.errors import UsageError
from tests.support.rows import rows

OWN = {"check": True, "journal": True, "dry-run": False}
# As pyxis and other plugins appear in the help.
PLUGIN_HELP = """
  -N, --nodes=N               number of nodes on which to run (N = min[-max])
      --constraint=list       specify a list of constraints
Options provided by plugins:
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH  [pyxis] the image to use
      --container-mount-home  [pyxis] bind mount the home
      --x-level[=N]           optional
"""


def never() -> str:
    raise AssertionError("sbatch --help was asked without need")


def read(*words: str, help_text: Callable[[], str] = never) -> CommandLine:
    return parse(words, own=OWN, read_help=help_text)


@rows
def test_script_is_found_where_sbatch_finds_it(words: list[str], script: int) -> None:
    line = read(*words)
    assert line.undecided is None
    assert line.script == words[script]
    assert line.arguments == tuple(words[script + 1 :])
    assert line.options == words[:script]
    assert line.plain == words


@pytest.mark.parametrize("words", [["-D", "/x"], ["-D/x"], ["-HD", "/x"], ["--chd=/x"]])
def test_directory_is_noted(words: list[str]) -> None:
    assert read(*words).values["chdir"] == "/x"


def test_own_options_are_taken_out_wherever_they_stand() -> None:
    line = read("--check", "off", "-N", "2", "--journal=/a b", "--dry-run", "t.sh", "--check=x")
    assert line.own == [("check", "off"), ("journal", "/a b"), ("dry-run", None)]
    assert line.options == ["-N", "2"]
    assert line.plain == ["-N", "2", "t.sh", "--check=x"]
    assert line.arguments == ("--check=x",)


def test_own_options_have_no_short_forms() -> None:
    assert read("--dry", "t.sh", help_text=lambda: "").undecided == "--dry"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--check"], "--check needs a value"), (["--dry-run=1"], "--dry-run takes no value")],
)
def test_misused_own_option_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(*words)


@pytest.mark.parametrize(
    "words", [["-N1", ":", "-N2", "t.sh"], [":", "t.sh"], ["--", ":"], ["-J", ":", "t.sh"]]
)
def test_components_of_a_heterogeneous_job_are_noticed(words: list[str]) -> None:
    line = read(*words)
    assert line.components
    assert line.script is None
    assert line.plain == words


@rows
def test_help_of_sbatch_decides_what_the_table_does_not(words: list[str], script: int) -> None:
    line = read(*words, help_text=lambda: PLUGIN_HELP)
    assert line.undecided is None
    assert line.script == words[script]


Sbatch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def installed(tmp_path: Path) -> Sbatch:
    if shutil.which("sbatch") is None:
        pytest.skip("sbatch is not installed")
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=t\nSlurmctldHost=h\nNodeName=n\nPartitionName=p Nodes=n\n")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sbatch", *words],
            env={**os.environ, "SLURM_CONF": str(config)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    return call


def test_every_option_of_the_installed_sbatch_is_in_the_table(installed: Sbatch) -> None:
    told = installed("--help")
    if told.returncode != 0:
        pytest.skip(f"sbatch --help fails: {told.stderr.strip()}")
    listed = listed_options(told.stdout)
    # The help itself errs here: --wrap needs its value, --container does too.
    listed |= {"wrap": Value.REQUIRED, "container": Value.REQUIRED}
    told_values = {name: value for name, value in listed.items() if value is not Value.NONE}
    assert listed.keys() - LONG.keys() == set()
    assert {name for name, value in told_values.items() if LONG[name] is Value.NONE} == set()
    assert {
        name
        for name, value in listed.items()
        if value is Value.NONE and LONG[name] is Value.REQUIRED
    } == set()


def test_installed_sbatch_finds_the_same_script(installed: Sbatch) -> None:
    for name, value in LONG.items():
        if name in {"help", "usage", "version", "autocomplete", "external", "wrap", "uid", "gid"}:
            continue
        words = [f"--{name}", "1"] if value is Value.REQUIRED else [f"--{name}"]
        told = installed(*words, "no-such-script").stderr
        assert read(*words, "no-such-script").script == "no-such-script"
        assert "Unable to open file 1" not in told, words
        assert "Batch script is empty" not in told, words
