# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sbatch`: a drop-in for sbatch that has the job's nodes checked first.

Runs where the user submits. It reads the script, the arguments and the environment, and calls
sbatch.

    submit        the command
    arguments     finds the script among sbatch's arguments, as sbatch does
    node_counts   how many nodes to allocate, and how many to run on
    foresight     what would let the job run unchecked, as far as it can be seen here
    script        the submitted text: a launcher with the user's script inside
"""
