# SPDX-License-Identifier: Apache-2.0
"""The doors to the machine and to Slurm. They touch, and decide nothing.

Each outside system has one door, with a time limit on every wait.

    slurm           the only door to Slurm
    journal         a run's directory and files
    processes       starts and ends child processes, each with a deadline
    last_said       what a child says, or the last of it
    signals         when they are heard, how a process leaves on one, their names
    proc            what the kernel says of a process and of mounts
    killable        runs a function in a child that is killed at its time limit; which are stuck
    accounts        whose a user id is: those for containers are the user's who has them
    private_files   files that one user keeps alone, and no other can slip in
    nvml            NVIDIA GPUs, as the driver sees them
    site_file       the site's file as TOML: read, with the line of every mistake
    telemetry       lines for the machine's log, and metrics as Prometheus reads them
    templates       what people copy (batch scripts, sbatch wrapper, shims), and where it is shipped
"""

# Where commands are looked for: slurmd sets no PATH for hooks (Slurm Prolog and Epilog Guide).
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
