# SPDX-License-Identifier: Apache-2.0
"""The doors to the machine and to Slurm. They touch, and decide nothing.

Each outside system has one door, with a time limit on every wait.

    slurm           the only door to Slurm
    journal         a run's directory and files
    processes       starts and ends child processes, each with a deadline
    killable        runs a function in a child that is killed at its time limit
    private_files   files that one user keeps alone, and no other can slip in
    machine_log     lines for the machine's log, which nothing waits for
    nvml            NVIDIA GPUs, as the driver sees them
    site_file       the site's file as TOML: read, with the line of every mistake
    exposition      metrics as Prometheus reads them
    templates       what people copy: batch scripts, the sbatch wrapper, the hooks' shims
    shipped         where the files are that come with slurm-health beside its code
"""
