# SPDX-License-Identifier: Apache-2.0
"""Symptom to cause: why a job's script failed, hangs or is slow, from what was collected. Pure.

An inference leads to others until nothing leads on; what is sure enough of them is said.

    inference      what is inferred, how sure it is, who infers it, and the bounded walk from a
                   symptom to its causes
    collected      the kinds of data that collectors gather
    diagnostician  observes a symptom, and resolves it into an action
    operators      those that are built in, in their order: what each leads on from, its function
    surroundings   operators about Slurm's word, the kernel's and the driver's
    ranks          operators about the first rank that failed
    starting       operators about steps that Slurm could not launch, and ranks that never met
    waits          operators about ranks that waited for each other, and about data that ended
                   before that of others
    before_it_failed  operator about a hang that the monitor saw before
    samples        what agents send of ranks; a training that stands still
    pulse          the one clock: when a training is due for an inspection, and whether it hangs
    output_lines   lines of output that count steps, and losses that are no numbers
    hang           HangDiagnostician: operators about where a training hangs
    comparison     ranks compared with each other and with before, window by window
    stragglers     ranks that are slower than the others, window by window; operators about why
    uneven         stages and batches with more to compute than others, which make no rank slow
    slow_steps     steps that take longer than before; connections over which ranks then wait
    known_errors   exceptions whose cause is known by their words
    mistakes       operators about mistakes that are no exception: quoted, and no node named
    last_words     what processes wrote before they failed; the kind of an exception, whose it is,
                   and whether it only follows from another
    training_log   tracebacks, torchrun's summary and Slurm's lines in a job's output
    rank_failures  how each rank failed, from all that tell of it
    ras            operators about what NCCL says of its ranks
    flight         where ranks parted and who holds the others up, by PyTorch's Flight Recorder
    flight_data    what a Flight Recorder, or NCCL's watchdog, tells of a rank
"""
