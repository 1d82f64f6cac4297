# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health`: the same as the `slurm-health` command; and an agent, with less."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # it finds nothing in what is being loaded, and takes its time
    if sys.argv[1:2] == ["agent"]:
        from slurm_health.cli.agent import main
    else:
        from slurm_health.cli.main import main
    gc.enable()
    main()
