# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health`: the same as the `slurm-health` command; and an agent, with less."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["agent"]:
        from slurm_health.cli.agent import main
    else:
        from slurm_health.cli.main import main
    main()
