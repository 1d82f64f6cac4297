# SPDX-License-Identifier: Apache-2.0
"""What the linters do not check of the modules.

Which module may import which is in `.importlinter`; `make lint` checks it.
"""

from __future__ import annotations

from pathlib import Path

import slurm_health

PACKAGE = Path(slurm_health.__file__).parent
NAME = "slurm_health"
MODULES = {
    ".".join([NAME, *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_LINES = 600  # a longer module has a second topic


def test_no_module_has_more_than_600_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}

    assert not {module: lines for module, lines in lengths.items() if lines > MOST_LINES}
