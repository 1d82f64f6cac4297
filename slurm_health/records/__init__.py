# SPDX-License-Identifier: Apache-2.0
"""The words that everything else is said in. Pure, and imported by every other quarter.

A word is said in one way everywhere, so it is here once.

    records         what a journal holds of a check: one type for each kind of record
    script_records  what it holds of the user's script: its runs, how it hung or failed, and why
    record_codec    a record to a line of a journal, and back
    decoding        bytes from outside to values: the one place, and every way to fail is one error
    verdict         rounds, their results, what is concluded of nodes; names of what is done
    allocation      what Slurm gave a job or would give one; which checks belong to one job
    nodeset         node lists as Slurm writes them, to names and back; which states are lost
    probe_catalog   which probes there are, who runs each, which part of a node it is about
    gpu_load        what GPUs reported while they were under load
    standings       what a site's history says against nodes, as every check reads it
    text            foreign text made safe for terminals, logs and Slurm; signals and ranks in words
    errors          the tree of errors, and their exit codes
"""
