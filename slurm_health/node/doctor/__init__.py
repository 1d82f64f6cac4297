# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether a site is set up so that the hooks can do their work.

Runs as whoever calls it, and changes nothing.

    slurm_conf      slurm.conf as Slurm shows it, and the scripts that it names
    cluster         the cluster: its release of Slurm, and whether one step can run on all nodes
    ownership       who can change what these scripts run
    machine         the site's file, and this machine
    site_actions    what may be done to nodes to repair them, and who is notified
    advice          what is said about it all
"""
