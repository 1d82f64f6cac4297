# SPDX-License-Identifier: Apache-2.0
"""What many checks say of a node together.

Pure, over values that `slurm_health.fleet.history` reads from journals.

    observation   what one check says of one node: values, and how they come of a journal's records
    standing      whether a node spoils more jobs than others do
"""
