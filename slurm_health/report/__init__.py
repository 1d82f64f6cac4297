# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what became of a job, as a table and as JSON.

Reads the journal's files and nothing else. It loads neither torch nor numpy, so it works on any
login node, at any time, even while the job runs.

    find      where a job's journals are, and what is in them
    build     the entries of a journal to a report
    figures   samples to the figures that are shown
    acts      intents and their results, put together
    model     the values that a report consists of
    table     a report as text
    post_mortem   why scripts failed
    while_training   hangs, and ranks that are slower than others
    phrases   the short texts in it
    layout    text that fits a terminal
    export    a report as JSON
    without_journal   why there is nothing to report, as far as Slurm knows
"""
