# SPDX-License-Identifier: Apache-2.0
"""Our options, from each place that they are given in, and what is said of those that are wrong."""

from collections.abc import Mapping
from typing import Any

import pytest

from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.options import FOR_JOB
from slurm_health.records.errors import ConfigError
from tests.preflight.sbatch.desk import Desk, launcher_spec
from tests.support.rows import rows


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
    assert launcher_spec(desk.text) == JobSpec(
        journal="/from/environment",
        python=f"{desk.directory}/env/bin/python",
        max_requeues=1,
        submit_time_s=1_700_000_000,
    )


@rows
def test_bad_line_is_named_with_its_number(desk: Desk, line: str, message: str) -> None:
    (desk.directory / "s.sh").write_text(f"#!/bin/sh\n#SBATCH -N2\n#HEALTH {line}\n")
    with pytest.raises(ConfigError, match=message):
        desk.submit("s.sh")
    assert not desk.called


@pytest.mark.parametrize(
    ("words", "extra", "message"),
    [
        (["--spares=few"], {}, r"--spares: expected a whole number"),
        (["--max-requeues=-1"], {}, "command line: --max-requeues: expected a whole number"),
        (["--journal=/j/\udcff"], {}, r"command line: --journal: .* is not UTF-8"),
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
def test_help_names_every_option_and_how_variables_are_called(
    desk: Desk, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit(word) == 0
    shown = capsys.readouterr().out
    for option in FOR_JOB:
        assert f"--{option.name}" in shown
    assert "SLURM_HEALTH_MAX_REQUEUES=2" in shown
    assert "--dry-run" in shown
    assert "sbatch --help" in shown
    assert max(map(len, shown.splitlines())) < 80
    assert not desk.called


@pytest.mark.parametrize(("spares", "restarts"), [(2, 0), (2, 2), (0, 3)])
def test_a_job_with_spares_and_restarts_keeps_its_spares_and_outlives_a_node(
    desk: Desk, spares: int, restarts: int
) -> None:
    desk.submit("-N4", f"--spares={spares}", f"--max-restarts={restarts}", "train.sh")

    kept = bool(spares and restarts)
    assert not spares or "--nodes=6" in desk.words
    assert ("--no-kill" in desk.words) is kept
    spec = launcher_spec(desk.text)
    assert (spec.keeps_spares, spec.max_restarts) == (kept, restarts)
    assert not spares or spec.nodes_wanted == 4


def test_what_is_recorded_names_the_defaults_too() -> None:
    recorded = JobSpec(script="train.sh").recorded()

    assert (recorded["on_straggler"], recorded["max_requeues"]) == ("exclude", 3)
    assert "script" not in recorded
