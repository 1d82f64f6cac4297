# SPDX-License-Identifier: Apache-2.0
"""Random trouble for real jobs on a lab: `python -m tests.lab chaos`.

plan      what one run does, chosen from its seed; pure
perform   carries a plan out on a cluster, moment by moment
look      what the run has left behind
judge     what of that must never be; pure
command   one run after another, and the evidence of those that went wrong
"""
