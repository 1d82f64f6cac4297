# SPDX-License-Identifier: Apache-2.0
"""What post-mortems found, as a block of the report."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.core.diagnosis.explain import lines_of
from slurm_health.report.layout import Page
from slurm_health.report.model import RunReport
from slurm_health.report.phrases import attempt_text


def post_mortems(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return why each script failed that did, in the order of the attempts."""
    rows = [["POST-MORTEM", "", "WHY THE SCRIPT FAILED"]]
    for run in runs:
        label = attempt_text(run)
        for title, text in lines_of(run.post_mortem) if run.post_mortem else ():
            rows.append([label, title, text])
            label = ""
    return page.table(rows) if len(rows) > 1 else []
