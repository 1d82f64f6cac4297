# SPDX-License-Identifier: Apache-2.0
"""What the product concludes and decides from fixed inputs: a net under every change.

    python -m tests.frozen           writes all of it anew: make freeze
    python -m tests.frozen --check   says what differs

Each module here generates entries from inputs; what they come to stands in a file of its own, one
entry a line. `tests/test_frozen.py` compares them. No sentence is frozen: only who is named, at
what level, and what is done.

    simulated    clusters that are numbers: verdicts of the Localizer
    trainings    recordings, logs, standstills: the cause, whose it is, and who is accused
    journals     journals of checks, replayed
    deciding     what a job does about a verdict, a failed script, a check that could not be made
    node_rules   accusations, the breaker, recovery, repair, lines of the kernel
    fleet        standings of nodes, and whom a sweep checks next
"""
