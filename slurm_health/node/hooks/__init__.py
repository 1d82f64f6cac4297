# SPDX-License-Identifier: Apache-2.0
"""What root runs on every node: prolog, epilog, health check, and the administrators' commands.

slurmd starts these before and after each job and every few minutes. They read what users write,
and execute and follow nothing of it. While the node is healthy they load no torch and no click and
call no Slurm command, because the prolog stands between a user and their job.

    prolog         before a job: checks the node
    epilog         after a job: checks the node, reads the job's findings about it
    healthcheck    every few minutes: checks the node, resumes it, publishes its health
    hook           what these three share: where they are, what they run and say
    partners       has an accused node checked together with others
    user_journal   reads an ended job's journal, as the job's user
    metrics        what a health check found, for Prometheus
    nodes          `slurm-health nodes`: what was drained, why, and how to resume it
    explain        `healthcheck --explain`: what runs here, and why
    init_config    `init config`: drafts a site's file from this node
    log            standard error and the system log
"""
