# SPDX-License-Identifier: Apache-2.0
"""The command line. No other room loads click.

Parses, builds, calls one room and exits. Results go to standard output, everything else to
standard error; every error becomes one line and an exit code in `main`.

    main         the command `slurm-health`: finds the others, turns errors into exit codes
    options      what several commands share: options, values, how a subcommand is found
    output       printed results, and a file that a command writes for others
    drop_ins     `slurm-health sbatch`, `slurm-health run`
    check        `slurm-health check`
    plan         `slurm-health plan`
    templates    `slurm-health templates`: scripts to edit
    report       `slurm-health report`
    follow       `slurm-health report --follow`
    history      history, lemons: what all checks say of nodes
    explain      why a job failed, by its files; what an error means
    clean        `slurm-health clean`
    hooks        healthcheck: what runs on a node, and the config file as commands read it
    nodes        nodes: what was drained
    sweep        `slurm-health sweep`
    site_setup   doctor, init config, init hooks, init default: how a site is set up
    internal     what only slurm-health itself calls: supervise, requeue-helper
    agent        `python -m slurm_health agent`: without click, because each node starts it
"""
