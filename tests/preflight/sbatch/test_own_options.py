# SPDX-License-Identifier: Apache-2.0
"""Our options, from each place that they are given in, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from slurm_health.preflight.options import Door, options_of
from slurm_health.preflight.sbatch import own_options
from slurm_health.records.errors import ConfigError, UsageError
from tests.support.desk import Desk, launcher_options


@pytest.mark.parametrize(
    ("word", "meant"), [("--max-restart=2", "--max-restarts"), ("--spare=1", "--spares")]
)
def test_an_option_of_ours_that_is_misspelt_is_suggested_where_sbatch_refuses_it(
    desk: Desk, word: str, meant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit(word, "train.sh", FAKE_CODE="1") == 1
    assert f"did you mean {meant}?" in capfd.readouterr().err
    desk.submit("--bogus", "train.sh", FAKE_CODE="1")
    assert "did you mean" not in capfd.readouterr().err


def test_command_line_wins_over_environment_over_script(desk: Desk) -> None:
    (desk.directory / "s.sh").write_bytes(
        b"#!/bin/sh\n#HEALTH --max-requeues=1 --journal '/from script' # why\n"
        b"#HEALTH --python /script/python\n"
    )
    desk.submit(
        "--python=env/bin/python",
        "s.sh",
        SLURM_HEALTH_JOURNAL="/from/environment",
        SLURM_HEALTH_PYTHON="python3.12",
        SLURM_HEALTH_CHECK="",
    )
    assert launcher_options(desk.text)[:4] == [
        "--check=auto",
        "--journal=/from/environment",
        f"--python={desk.directory}/env/bin/python",
        "--max-requeues=1",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-requeue=1", r"s\.sh, line 3: --max-requeue: unknown.*mean --max-requeues\?"),
        ("--dry-run", r"s\.sh, line 3: --dry-run: unknown #HEALTH option"),
        ("spares=1", r"s\.sh, line 3: spares: unknown"),
        ("--max-requeues", r"s\.sh, line 3: --max-requeues: needs a value"),
        ("--on-straggler=shoot", r"line 3: --on-straggler: 'shoot' is not one of exclude, report"),
        ("--check=fast", r"s\.sh, line 3: --check: fast: no such probe; valid: auto"),
        ("--network-floor=8%", r"s\.sh, line 3: --network-floor: expected a number from 0.01"),
        ("--min-round=3", r"s\.sh, line 3: --min-round: unknown.*mean --min-rounds\?"),
        ("--journal='x", r"s\.sh, line 3: #HEALTH: cannot be read: no closing quotation"),
    ],
)
def test_bad_line_is_named_with_its_number(desk: Desk, line: str, message: str) -> None:
    (desk.directory / "s.sh").write_text(f"#!/bin/sh\n#SBATCH -N2\n#HEALTH {line}\n")
    with pytest.raises(ConfigError, match=message):
        desk.submit("s.sh")
    assert not desk.called


@pytest.mark.parametrize(
    ("words", "extra", "message"),
    [
        (["--max-requeues=-1"], {}, "command line: --max-requeues: expected a whole number"),
        (["--check=", "x"], {}, "command line: --check: '': names nothing to check; valid: auto"),
        (
            [],
            {"SLURM_HEALTH_CHECK": "no"},
            "environment: SLURM_HEALTH_CHECK: no: no such probe; valid: auto",
        ),
    ],
)
def test_bad_value_is_named_with_its_source(
    desk: Desk, words: list[str], extra: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        desk.submit(*words, "train.sh", **extra)


def test_lines_that_are_not_ours_are_left_alone(desk: Desk) -> None:
    (desk.directory / "s.sh").write_text(
        "#!/bin/sh\n#HEALTHY --x\n# HEALTH --x\ntrue\n#HEALTH --x\n"
    )
    assert desk.submit("s.sh") == 0


@pytest.mark.parametrize("word", ["--help", "-h", "-Hh"])
def test_help_names_every_option_and_variable(
    desk: Desk, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit(word) == 0
    told = capsys.readouterr().out
    in_script = options_of(Door.SCRIPT)
    for option in options_of(Door.SBATCH).values():
        assert f"--{option.name}" in told
        assert (option.variable in told) is (option.name in in_script)
    assert "sbatch --help" in told
    assert not desk.called


def test_help_fits_a_terminal_of_80_columns() -> None:
    assert max(map(len, own_options.help_text().splitlines())) < 80


def test_a_job_that_keeps_its_spares_outlives_a_node_and_is_restarted_as_often(
    desk: Desk,
) -> None:
    desk.submit("-N4", "--spares=2", "--keep-spares", "train.sh")

    assert {"--nodes=6", "--no-kill"} <= set(desk.words)
    options = launcher_options(desk.text)
    assert {"--keep-spares=yes", "--max-restarts=2", "--nodes-wanted=4"} <= set(options)


def test_restarts_alone_change_nothing_that_sbatch_is_asked_for(desk: Desk) -> None:
    desk.submit("-N4", "--max-restarts=3", "train.sh")

    assert "--no-kill" not in desk.words
    assert "--max-restarts=3" in launcher_options(desk.text)


def test_spares_that_are_not_there_cannot_be_kept(desk: Desk) -> None:
    with pytest.raises(UsageError, match="--keep-spares: there are none to keep"):
        desk.submit("-N4", "--keep-spares", "train.sh")


def test_a_word_that_is_no_number_of_spares_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigError, match=r"--spares: expected a whole number.*lemons"):
        desk.submit("-N4", "--spares=few", "train.sh")
