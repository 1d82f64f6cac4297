# SPDX-License-Identifier: Apache-2.0
"""The command line. No other room loads click.

Parses, builds, calls one room and exits. Results go to standard output, everything else to
standard error; every error becomes one line and an exit code in `main`.

    main             the command `slurm-health`: finds the others, turns errors into exit codes
    check            `slurm-health check`
    drop_ins         `slurm-health sbatch`, `slurm-health run`
    report           `slurm-health report`
    follow           `slurm-health report --follow`
    history          history, lemons: what all checks say of nodes
    clean            `slurm-health clean`
    sweep            `slurm-health sweep`
    plan             `slurm-health plan`
    hooks            prolog, epilog, healthcheck: what runs on a node
    nodes            nodes, notify: what was drained, and who is notified
    site_setup       doctor, init config, init hooks, init default: how a site is set up
    explain          why a job failed, by its files; what an error means
    shipped          templates: what comes with slurm-health
    internal         what only slurm-health itself calls: supervise, requeue-helper
    agent            `python -m slurm_health agent`: without click, because each node starts it
    options          options and values that several commands share
    shared_options   the options of `slurm_health.preflight.options`, as click has them
    output           printed results, and a file that a command writes for others
"""
