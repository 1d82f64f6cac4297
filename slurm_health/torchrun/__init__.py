# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: torchrun that fills in what Slurm knows, and checks first."""
