# SPDX-License-Identifier: Apache-2.0
"""Symptom to cause: why a job's script failed, hangs or is slow, from what was collected. Pure.

An inference leads to others until nothing leads on; what is sure enough of them is said.

    collected      what is known of a failure, by kind
    diagnostician  observes a symptom, and resolves it into an action
    operators      those that are built in, in their order: what each leads on from, its function
    failed         rules about the first rank that failed, or the last words of a script
    surroundings   rules about what Slurm, kernels, drivers and the monitor say
    failure        FailureDiagnostician and FailureNodeDiagnostician: what follows a failed script
    rows           a row of the tables that lead from words to causes
    words          the rows of what exceptions say
    words_of_launchers  the same of shells, Slurm and ranks that only waited
    waits          rules about ranks that waited: who parted from the others, or never came
    collectives    how far each rank came, by all sources, and who holds the others up
    samples        what agents send of ranks; a training that stands still
    pulse          the one memory and clock: what ranks did, when a training is due for an
                   inspection, and whether it hangs
    output_lines   lines of output that count steps, and losses that are no numbers
    hang           HangDiagnostician: operators about where a training hangs
    pace           slow ranks, uneven work, slower steps, window by window; operators about why
    output         a job's output, decoded once: failures of ranks, facts of Slurm, kernel and NCCL
    ends           how a process ended, by its traceback and by launchers
    watchdogs      what NCCL's watchdogs write
    ras            what NCCL says of its ranks
"""
