# SPDX-License-Identifier: Apache-2.0
"""The command line. No other room loads click.

Parses, builds, calls one room and exits. Results go to standard output, everything else to
standard error; every error becomes one line and an exit code in `main`.

    main             the command `slurm-health`: finds the others, turns errors into exit codes
    check            `slurm-health check`
    drop_ins         `slurm-health sbatch`, `slurm-health run`
    report           `slurm-health report`
    follow           `slurm-health report --follow`
    history          history, lemons, metrics: what all checks say of nodes
    clean            `slurm-health clean`
    sweep            `slurm-health sweep`
    plan             `slurm-health plan`
    hooks            prolog, epilog, healthcheck: what runs on a node
    nodes            nodes, notify: what was drained, and who is notified
    site_setup       doctor, init-config, init-hooks, init-default: how a site is set up
    shipped          templates, explain: what comes with slurm-health
    internal         what only slurm-health itself calls: supervise, requeue-helper
    agent            `python -m slurm_health agent`: without click, because each node starts it
    shared_options   the options of `slurm_health.preflight.options`, as click has them
    output           printed results, and a file that a command writes for others
"""

import sys


def _load_msgspec() -> None:
    """Have it do without typing_extensions, of which it needs nothing from Python 3.11 on.

    Where torch is installed that is too, and agents would load it at each start.
    """
    if "typing_extensions" not in sys.modules:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]
        try:
            import msgspec  # noqa: F401
        finally:
            del sys.modules["typing_extensions"]


_load_msgspec()
