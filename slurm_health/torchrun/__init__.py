# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: torchrun that takes its settings from Slurm and checks the nodes first.

Runs in every task of a training step, as the job's user, and in the end becomes torchrun. It reads
the environment, and the journal if there is a check. When workers have failed, torchrun asks
`restarts` what to do before it starts them again.

    train           the command: read it, check if told to, become torchrun
    arguments       what torchrun gets besides the user's arguments; where node 0 is, and which node
                    this is, where Slurm does not say it
    place           which of the step's processes this one is
    checking        a check of the nodes that are to train, as each takes part in it
    restarts        what follows when workers have failed
    joint_check     the check, run by processes that srun has started, each with its own agent
    unshared_check  the same on nodes that share no directory, and the secret that they may share
    channel         how those talk
    earlier_check   one of this attempt that need not be repeated
    watching        the monitor beside the training
    node_choice     which nodes training starts with
    starting        those nodes, and where they find each other
"""
