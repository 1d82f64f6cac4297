# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether a site is set up so that the hooks can do their work.

It runs as the user who calls it, and changes nothing.

    slurm_conf      slurm.conf as Slurm shows it, and the scripts that it names
    ownership       who can change the programs and files of root
    machine         the config file, this machine, repairs and notifications
    advice          the advice, as text and JSON
"""
