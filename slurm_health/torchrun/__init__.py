# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run`: torchrun that takes its settings from Slurm and checks the nodes first.

Runs in every task of a training step, as the job's user, and in the end becomes torchrun. It reads
the environment, and the journal if there is a check. When workers have failed, torchrun asks
`restarts` what to do before it starts them again.

    train          the command: read it, check if told to, become torchrun
    restarts       what follows when workers have failed
    check          the check of the nodes that are to train, as each process takes part in it
    channel        files of the run, mirrored to and from nodes that share no directory
    earlier_check  a check of this attempt that need not be repeated
    step           the file that all processes of a start read: which agents to start, who trains
    node_choice    which nodes training starts with
    place          which of the step's processes this one is, and where the nodes meet
    arguments      what torchrun gets besides the user's arguments
    in_job         what the job's own interpreter executes
"""
