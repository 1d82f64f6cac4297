# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether a site is set up so that the hooks can do their work.

Runs as whoever calls it, and changes nothing.

    slurm_conf      slurm.conf as Slurm shows it, and the scripts that it names
    ownership       who can change what root runs and reads
    machine         the config file, this machine, what may be done to nodes, who is notified
    advice          the advice, as text and JSON
"""
