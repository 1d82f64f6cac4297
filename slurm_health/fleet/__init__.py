# SPDX-License-Identifier: Apache-2.0
"""All jobs and all nodes over time.

Read from the journals of all users, each of which may hold anything.

    observation  one check's records -> what it says of each node. Pure
    standing     many jobs -> the conclusion about each node. Pure
    reading      a job's journal -> its checks; other users' in a child, as their owner
    index        the SQLite index of all journals: kept up to date, and queried
    answers      `history` and `lemons`: text, JSON, metrics
    partners     which idle nodes are checked together. Pure
    sweep        `slurm-health sweep`: checks idle nodes with jobs that give way
    clean        `slurm-health clean`: removes the caller's old journals
"""
