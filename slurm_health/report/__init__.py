# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what became of a job, as a table, as a page, and for programs.

Reads the journal's files; Slurm is asked about jobs that have none, and about the nodes of
recent ones. It loads neither torch nor numpy, so it works on any login node, at any time, even
while the job runs.

    find      where a job's journals are
    read      what is in one of them and what is missing; another user's in a child with limits
    build     the entries of a journal to a report
    rounds    the rounds and the parts of nodes, from those entries
    sentences   what was seen of a training, and why, in the same words everywhere
    timeline  what happened and when, and as text
    model     the values that a report consists of
    summary   what was found, what was done, what to do next
    no_exchange   no two nodes could exchange data: one finding, and what to look at
    table     a report as text
    details   evidence, rounds and samples in that text, and what counted as slow
    post_mortem   what went wrong in scripts, while they ran and when they failed
    progress  how far a job has got, for `slurm-health report --follow`
    phrases   the short texts in it
    layout    text that fits a terminal, and its colours
    export    a report as JSON
    web_page    a report as a page of HTML
    charts    its picture, as numbers
    latest    the caller's latest jobs
    slurm_now   what Slurm says now: why there is no journal, which nodes are out of use
"""
