# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what became of a job, as a table, as a page, and for programs.

Reads the journal's files; Slurm is asked about jobs that have none, and about the nodes of
recent ones. It loads neither torch nor numpy, so it works on any login node, at any time, even
while the job runs.

    find      where a job's journals are
    read      what is in one of them, and what is missing
    same_id   jobs that had the same id, one after another
    build     the entries of a journal to a report
    timeline  what happened in it and when
    figures   samples to the figures that are shown
    limits    how slow a node had to be to be called slow
    rounds    who was measured with whom, and how long that took
    hardware  the parts of a node that its journal names
    acts      intents and their results, put together
    model     the values that a report consists of
    summary   what was found, what was done, what to do next
    no_exchange   no two nodes could exchange data: one finding, and what to look at
    table     a report as text
    timeline_text   what happened, in that text
    details   evidence, rounds and samples in that text
    colour    what stands out in it on a terminal
    post_mortem   why scripts failed
    progress  how far a job has got, for `slurm-health watch`
    while_training   hangs, and ranks that are slower than others
    phrases   the short texts in it
    layout    text that fits a terminal
    export    a report as JSON
    schema    the JSON Schema of that
    spreadsheet   what was measured as CSV
    web_page  a report as a page of HTML
    charts    its pictures, as numbers
    span      the one of when a check did what
    latest    the caller's latest jobs
    elsewhere    where the journal is that another machine has
    nodes_now   which of a job's nodes are out of use now, and why
    without_journal   why there is nothing to report, as far as Slurm knows
"""
