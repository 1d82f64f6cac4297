# SPDX-License-Identifier: Apache-2.0
"""The types that all packages share. Pure, and imported by every other package.

An idea that two packages share has its one type here.

    records         the records of a check in a journal, one type per kind
    script_records  the records of the user's script: its starts, how it hung or failed, and why
    record_codec    a record to a line of a journal, and back
    decoding        bytes from outside to values, with one error for every failure
    verdict         rounds, their results, verdicts about nodes; names of actions
    allocation      the allocation of a job; the checks that belong to one job
    nodeset         Slurm's node lists to names and back; states of lost nodes
    probe_catalog   the probes, their scopes, and the components that they measure
    gpu_load        samples of GPUs under load
    standings       the standings of a site's nodes, which every check reads
    text            foreign text made safe for terminals, logs and Slurm; signals and ranks in words
    errors          the tree of errors, and their exit codes
"""
