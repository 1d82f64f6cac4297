# SPDX-License-Identifier: Apache-2.0
"""A year of a real cluster's faults, replayed against the rules of slurm-health and of others.

    recording    the trace: when which node failed, of what, and how long its repair took
    kinds        what a fault of each kind does to a job, and who can see it: a table with sources
    checks       what a check says of so many nodes with such faults: the real Localizer, once each
    policies     who is compared, as values
    jobs         the mix of jobs
    clock        the event queue
    pool         played Slurm: which nodes are free, whose turn it is
    rules        the real rules of decisions and restarts, of played values
    training     a job from its start to its end, with its failures
    care         a node from its fault to its return
    upkeep       sweeps, lemons, probation
    measures     what is counted
    results      one line of JSON for each run, so that an ended table goes on
    page         the runs of docs/explanation/year.md, its tables, and where they stand in it
    pictures     its pictures

Nothing but `results` and `__main__` touches anything; randomness comes from the seed.
"""
