# SPDX-License-Identifier: Apache-2.0
"""The command line as its users meet it: real processes, no torch."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from slurm_health import __version__
from slurm_health.cli.main import commands
from tests.support.command_line import COMMAND, one_line, slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import write_healthy_run
from tests.support.rows import rows

CONTEXT = click.Context(commands)
COMMANDS = {
    name: command
    for name in commands.list_commands(CONTEXT)
    if (command := commands.get_command(CONTEXT, name))
}
VISIBLE = list(COMMANDS)


def test_the_help_of_all_loads_no_command() -> None:
    code = (
        "import sys; from slurm_health.cli.main import commands\n"
        "commands.main(['--help'], prog_name='slurm-health', standalone_mode=False)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('slurm_health')))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

    loaded = set(done.stdout.splitlines()[-1].split())
    expected = ("cli", "cli.main", "records", "records.errors")
    assert loaded == {"slurm_health", *(f"slurm_health.{name}" for name in expected)}


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("words", [[], *([name] for name in VISIBLE)], ids=" ".join)
def test_help_fits_a_screen_and_explains_each_option(words: list[str], columns: int) -> None:
    done = slurm_health(*words, "--help", environ={"COLUMNS": str(columns)})

    lines = done.stdout.splitlines()
    assert (done.code, done.stderr) == (0, "")
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= (60 if columns == 80 else 80)
    for parameter in COMMANDS[words[0]].params if words else ():
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, parameter.name
            assert parameter.help.rstrip().endswith((".", "]")), parameter.help
            assert all(option in done.stdout for option in parameter.opts)


def test_the_help_names_the_fifteen_commands_in_three_groups() -> None:
    done = slurm_health("-h", environ={"COLUMNS": "80"})

    assert slurm_health("--version").stdout == f"slurm-health {__version__}\n"
    nothing = slurm_health()
    assert (nothing.code, "Usage: slurm-health" in nothing.stdout + nothing.stderr) == (2, True)
    assert len(VISIBLE) == 15
    for name in VISIBLE:
        (line,) = [x for x in done.stdout.splitlines() if x.startswith(f"  {name} ")]
        assert line.endswith("."), line  # it fits
    assert not {"supervise", "requeue-helper"} & set(done.stdout.split())
    titles = ("For your jobs:", "To see what happened:", "For administrators:")
    places = [done.stdout.index(title) for title in titles]
    assert places == sorted(places)


@rows
def test_a_mistake_is_one_line_that_names_it_or_what_was_meant(words: list[str], said: str) -> None:
    done = slurm_health(*words)

    assert done.code == 2
    assert done.stdout == ""
    line = one_line(done.stderr)
    assert line.startswith("slurm-health: ")
    assert said in line
    assert "--help" in line


@rows
def test_a_shell_completes_commands_options_and_files(line: str, completed: list[str]) -> None:
    words = line.split()
    asked = {"_SLURM_HEALTH_COMPLETE": "bash_complete"}
    asked |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    # By its own name: that of the variable follows from it.
    script = [sys.executable, "-c", "from slurm_health.cli.main import main; main()"]
    ran = subprocess.run(
        script, env={**os.environ, **asked}, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == completed


@rows
def test_a_reader_that_has_had_enough_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    write_healthy_run(tmp_path, job=12)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *words],
            env={
                **FakeSlurm(tmp_path / "slurm").environ(),
                "SLURM_HEALTH_JOURNAL": str(tmp_path),
            },
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_site_file_with_a_mistake_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('jornal = "/x"\n')

    done = slurm_health(
        "report", "12", environ={"SLURM_HEALTH_CONFIG": str(tmp_path / "config.toml")}
    )

    assert done.code == 2
    assert "did you mean journal?" in one_line(done.stderr)
