# SPDX-License-Identifier: Apache-2.0
"""The command line. Nothing else of slurm-health loads click."""
