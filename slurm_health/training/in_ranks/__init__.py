# SPDX-License-Identifier: Apache-2.0
"""Loaded in the ranks of a training themselves, whose Python may be older and know no slurm_health.

PYTHONPATH leads to this directory (`--heartbeat=auto`). It uses the standard library alone, and
`heartbeat.py` by its path; nothing here may break a script, or cost it anything worth speaking of.

    sitecustomize  what Python loads at its start: waits for torch, and beats for its optimizers
"""
