# SPDX-License-Identifier: Apache-2.0
"""All jobs and all nodes over time.

Read from the journals of all users, each of which may hold anything.

    standing        many checks -> what they say of a node together. Pure
    history         `slurm-health history`, `lemons`: all journals, per node; the index
    retention       `slurm-health clean`: removes old journals
    sweep           `slurm-health sweep`: checks idle nodes with jobs that give way
"""
