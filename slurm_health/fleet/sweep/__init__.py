# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep`: checks idle nodes, a few at a time, with jobs that give way to others.

submission  one turn: what Slurm and the history say, and the jobs that are submitted for it
outcome     what became of the jobs of earlier runs
"""
