# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep`: checks idle nodes, a few at a time, with jobs that give way to others.

submission  one run: the jobs that are submitted, and what became of earlier ones
"""
