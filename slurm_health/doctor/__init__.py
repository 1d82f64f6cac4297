# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: whether a site is set up so that the hooks can do their work.

Runs as whoever calls it, and changes nothing. `slurm_conf` judges slurm.conf as Slurm shows it,
`machine` the site's file, the shims and this machine; `advice` is what they say.
"""
