# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

from slurm_health.records.script_records import Diagnosed
from slurm_health.report.export import as_json
from slurm_health.report.read import load
from slurm_health.report.table import job_text
from slurm_health.system import journal
from tests.support.journals import Clock, write_requeued_job

FOUND = Diagnosed(
    cause="node-lost",
    description="Slurm lost n2 while the job ran",
    attribution="node fault",
    sureness="certain",
    first="rank 0 on n1 gave up first, waiting for others",
    nodes=["n2"],
    accused=["n2"],
    evidence=["Slurm: n2 is DOWN\x1b[31m*"],
    advice="start again without n2 (sbatch --exclude=n2) and tell your administrator",
    chain=["slurm-lost-a-node: node-lost"],
)


def write(root: Path) -> None:
    write_requeued_job(root)
    attempt = root / "lab" / "12" / "1"
    after = Clock(2_000_000_000.0)  # of the script
    journal.Writer(attempt, journal.POST_MORTEM, after).append(FOUND)


def test_the_report_ends_with_why_the_script_failed(tmp_path: Path) -> None:
    write(tmp_path)
    block = job_text(load(tmp_path, "12")).split("\n\n")[-1]

    assert block.startswith("POST-MORTEM")
    for words in (FOUND.description, "(node fault, certain)", FOUND.first, FOUND.advice):
        assert words in block
    assert "attempt 1" in block
    assert "\x1b" not in block


def test_programs_get_every_field_of_it(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = json.loads(as_json(load(tmp_path, "12")))["runs"]

    assert first["post_mortem"] is None
    assert second["post_mortem"]["accused"] == ["n2"]
    assert second["post_mortem"]["not_collected"] == []
