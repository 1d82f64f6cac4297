# SPDX-License-Identifier: Apache-2.0
"""What of `slurm-health run` is executed by the job's own interpreter, which has torch.

    arguments         a torchrun command line, read by torchrun's own parser
    watched_torchrun  torchrun with a monitor, and a decision before it starts workers again
    nodes             the last output of this node's workers; what the nodes of a training exchange
    monitor           the monitor beside the workers, and the agent of each node outside Slurm

These modules import nothing but torch and Python's standard library.
"""
