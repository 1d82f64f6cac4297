# SPDX-License-Identifier: Apache-2.0
"""Access to the machine and to Slurm, without decisions.

Every outside system has one module, with a timeout on every wait.

    slurm           all access to Slurm
    journal         a run's directory and files
    processes       starts and ends child processes, with deadlines
    signals         delaying them, leaving on one, their names
    proc            processes and mounts, from /proc
    killable        runs a function in a child that is killed at its deadline; stuck children
    accounts        owners of user ids, those for containers included
    private_files   files that only one user can have made or changed
    owner           messages to a job's owner, by Slurm's mail or the owner's command
    nvml            NVIDIA GPUs, from the driver
    site_file       the config file as TOML, with the line of every mistake
    telemetry       lines for the machine's log, and metrics for Prometheus
    templates       files to copy (batch scripts, sbatch wrapper, shims), and where they are shipped
"""

# Where commands are looked for: slurmd sets no PATH for hooks (Slurm Prolog and Epilog Guide).
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The files that agents of watched trainings touch: `UID.JOB`.
WATCHED = "/run/slurm-health/watch"
