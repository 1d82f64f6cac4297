# SPDX-License-Identifier: Apache-2.0
"""slurm-health: finds the bad node of a Slurm training job before the job starts."""

__version__ = "0.1.0"
