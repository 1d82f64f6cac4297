# SPDX-License-Identifier: Apache-2.0
"""slurm-health: finds the bad node of a Slurm training job before the job starts.

Every package is one process, one command, or one kind of decision; its docstring says which, and
what it may touch. CONTRIBUTING.md has the picture of all of them.
"""

__version__ = "0.1.0"
