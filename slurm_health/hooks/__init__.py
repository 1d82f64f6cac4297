# SPDX-License-Identifier: Apache-2.0
"""What root runs on every node: prolog, epilog, health check.

Nothing here may load torch, click, ClusterShell or a Slurm command's output while the node is
well: the prolog stands between a user and the job.
"""
