# SPDX-License-Identifier: Apache-2.0
"""slurm-health: finds the bad node of a Slurm training job before the job starts.

Nine quarters, each what one person comes for; a package in one is one process or one command, and
its docstring says what it may touch. CONTRIBUTING.md has the picture.
"""

__version__ = "0.1.0"
