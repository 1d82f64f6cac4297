# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether this site is set up so that the hooks can do their work."""
