# SPDX-License-Identifier: Apache-2.0
"""The command line. No other room loads click.

Parses, builds, calls one room and exits. Results go to standard output, everything else to
standard error; every error becomes one line and an exit code in `main`.

    main       the command `slurm-health`, and what has no module of its own
    check      `slurm-health check`
    run        `slurm-health run`
    plan       `slurm-health plan`
    hooks      prolog, epilog, healthcheck, init-config, nodes
    doctor     `slurm-health doctor`
    terminal   how results are printed
"""
