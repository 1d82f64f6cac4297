# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: a job's story as text, as a page, and for programs.

Reads the journal's files; Slurm is asked about jobs that have none, and about recent ones. It loads
neither torch nor numpy, so it works on any login node, at any time, even while the job runs.

    find        where a job's journals are
    read        the entries of one of them, and what is missing; those of other users in a child
    story       the facts of a report: types
    acts        acts on nodes and the job, and how far they got
    build       the entries of a journal to a story
    slurm_now   what Slurm says now: why there is no journal, how a job stands, its nodes
    sentences   the words for parts of a story, the same in a job's output and in its report
    summary     the outcome, findings, acts, what to do next
    tables      the rest of a report, in rows
    layout      text that fits a terminal, and its colours
    text        a report as text
    web_page    a report as a page of HTML
    export      a report as JSON, and its schema
    jobs        the caller's latest jobs, or the tasks of an array, one per line
"""
