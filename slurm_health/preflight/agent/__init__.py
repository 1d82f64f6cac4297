# SPDX-License-Identifier: Apache-2.0
"""The process on every node of a job: runs its workers and records what they measured.

Started by the master with one `srun`, as the job's user. It loads no torch; its workers do. It
reads the master's file of the journal and writes its own, and calls nothing of Slurm.

    agent            the process: runs the rounds that the master orders, records what happened
    order_poller     when it reads orders, and whether the master is still there
    node_round       the node's part in one round: its groups, its results, how it ended
    workers          all of a node: started, once more if need be, waited on, ended
    worker_process   one worker: started, sent to, read from, killed; whether it stands still
    node_facts       what an agent has to know about its node
    storage          its test of storage, in a child, and what that leaves behind
    gpu_monitor      a process that reports the state of each GPU four times a second
"""
