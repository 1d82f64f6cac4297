# SPDX-License-Identifier: Apache-2.0
"""What root runs on every node: prolog, epilog, health check, and the administrators' commands.

slurmd starts these before and after every job and every few minutes. They read what users write,
and execute and follow nothing of it. While the node is healthy they load no torch and no click and
call no Slurm command, because a job waits for its prolog.

    prolog         before a job: checks the node
    epilog         after a job: checks the node, reads the job's findings about it
    healthcheck    every few minutes: checks the node, resumes it, publishes its health
    unkillable     records the processes of a step that SIGKILL does not end
    partners       checks an accused node together with others
    user_journal   reads an ended job's journal, as the job's user
    metrics        the results of a health check, for Prometheus
    nodes          `slurm-health nodes`: drained nodes, why, and how to resume them
    explain        `healthcheck --explain`: what runs here, and why
    init_config    `init config`: drafts a site's file from this node
"""
