# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health`: the same as the `slurm-health` command."""

from slurm_health.cli.main import main

if __name__ == "__main__":
    main()
