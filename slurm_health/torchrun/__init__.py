# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: torchrun that takes its settings from Slurm and checks the nodes first.

Runs in every task of a training step, as the job's user, beside the torchrun of that task. If
there is nothing to check, watch or restart, it becomes torchrun.

    train           the command: read it, and decide what this process has to do
    starts          a training: one start after another
    process         one torchrun from its start to its end, with a monitor beside it
    quiet_torchrun  what that is, in the job's own interpreter
    restarts        what follows when workers have failed
    check           the check of the nodes that are to train, as each process takes part in it
    step            what the processes of a start write for each other
    channel         these files, mirrored to and from nodes that share no directory
    node_choice     which nodes training starts with
    place           which of the processes this one is, and where the nodes meet
    arguments       what torchrun gets besides the user's arguments
"""
