# SPDX-License-Identifier: Apache-2.0
"""`slurm-health history` and `lemons`: all checks whose journals the caller may read, per node.

The journals are the truth. What is answered comes from an index of them, a cache that is brought up
to date first, and rebuilt from nothing where it is damaged, missing or older.

    read         a job's journal to what its checks say of their nodes; other users' in a child
    place        where the index lies, and whether it can be trusted
    index        the index: what it holds and answers
    database     the SQLite database that it lies in
    refresh      brings an index up to date with the journals
    answer       what is asked of it, and the values that it is answered with
    presentation  an answer as text or JSON, and the standing of every node for Prometheus
    advice       what it advises: spares, nodes to look at, how much is known
"""
