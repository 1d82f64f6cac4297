# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether a site is set up so that the hooks can do their work.

Runs as whoever calls it, and changes nothing.

    slurm_conf      slurm.conf as Slurm shows it, and the scripts that it names
    releases        what its release of Slurm lets a site do, and newer ones
    large_cluster   whether one step can run on all its nodes
    ownership       who can change what these scripts run
    machine         the site's file, and this machine
    mending         what may be done to nodes to mend them
    notices         who is told of what happens to nodes
    advice          what is said about it all
"""
