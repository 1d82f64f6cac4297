# SPDX-License-Identifier: Apache-2.0
"""Storms: a cluster of many real slurmds whose nodes break together. `python -m benchmarks.storms`.

plan      what happens in each storm, chosen from a seed; pure
runners   the prologs and health checks that stand in the storm: ours, and others' beside it
cluster   the cluster: its slurm.conf, its jobs, what it shows from outside
perform   carries a plan out, waits for what mends itself
look      what the storm has left behind
judge     what of that must never be; pure
"""
