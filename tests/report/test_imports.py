# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import slurm_health.report.export, slurm_health.report.read, slurm_health.report.text
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "click"}))
"""


def test_a_report_loads_neither_torch_nor_numpy_nor_click() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == ""
