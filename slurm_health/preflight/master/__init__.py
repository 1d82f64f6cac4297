# SPDX-License-Identifier: Apache-2.0
"""The process on a job's first node: leads one check, from the allocation to the verdict.

Runs as the job's user. It writes the journal's master file, reads the agents' files, and starts
the agents; what happens next is decided in `preflight.session`.

    run_check           one check from end to end
    check_settings      what it is told
    job_environment     what a job trains in: its interpreter, and what `--setup` sets
    after_verdict       what becomes of the job once the verdict stands
    master              the loop: read the journal, ask the session what to do, do it
    priors              how likely nodes are to be bad, by this job's past and the site's history
    check_log           the lines of the log about a check
    launcher            starts one agent per node, as a Slurm step or as local processes
    unchecked           ends a check that never got to measure
"""
