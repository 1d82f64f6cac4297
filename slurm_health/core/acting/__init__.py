# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what becomes of the job and its nodes. Pure.

Called by the process that acts on a verdict; `acting` performs what is decided here.

    policy            what the user and the site allow to be done about a verdict
    decide            one decision: drains, a smaller job, how it ends, each with its reason
    drains            which nodes are drained, and the reason set on them
    job_comment       the comment on a held job: why it waits, and what to type
    resized_environ   the SLURM_ variables of a job that continues on some of its nodes
"""
