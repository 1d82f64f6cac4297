# SPDX-License-Identifier: Apache-2.0
"""Symptom to cause: why a job's script failed, hangs or is slow, from what was collected. Pure.

An inference leads to others until nothing follows; the surest end is the conclusion.

    collected      data about a failure, by kind
    diagnostician  observes a symptom, and resolves it into an action
    operators      the built-in ones, in their order
    failed         rules about the first rank that failed, or the last words of a script
    surroundings   rules about Slurm, kernels, drivers and the monitor
    failure        FailureDiagnostician and FailureNodeDiagnostician: the action after a failure
    rows           a row of the tables that lead from words to causes
    words          the rows for exceptions
    words_of_devices  those about GPUs and their drivers
    words_of_launchers  the rows for shells, Slurm and ranks that only waited
    waits          rules about ranks that waited: which parted from the others, or never came
    collectives    how far ranks came, by all sources, and which hold the others up
    samples        the reports of agents; a training that stands still
    pulse          the one memory and clock: the activity of ranks, when a training is due for an
                   inspection, and whether it hangs
    output_lines   lines of output that count steps, and losses that are no numbers
    hang           HangDiagnostician: operators about where a training hangs
    pace           slow ranks, uneven work, slower steps, window by window; operators about why
    output         a job's output, decoded once: failures of ranks, facts of Slurm, kernel and NCCL
    ends           how a process ended, by its traceback and by launchers
    watchdogs      the lines of NCCL's watchdogs
    ras            NCCL's own report of its ranks
"""
