# SPDX-License-Identifier: Apache-2.0
"""What makes the wheel, the `.deb` and the `.rpm`; none of it is installed.

Each module's part in that:

    packages  the `.deb` and the `.rpm` of this machine's distribution
    release   `make release`: all that a release is made of, with its checksums
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All but those that must match something else on the machine.
EXTRAS = "diagnosis,gpu,html"


def run(*words: object) -> None:
    """Run a command at the root of the tree; where it fails, end with what it printed."""
    argv = list(map(str, words))
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{argv[0]} failed:\n{done.stdout}{done.stderr}")
