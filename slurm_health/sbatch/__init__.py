# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sbatch`: a drop-in for sbatch whose jobs are checked first."""
