# SPDX-License-Identifier: Apache-2.0
"""The one way to take a node out of the pool, and the one way to return it.

Runs as root: in the hooks, on the node concerned, in root's jobs, and in the administrators'
commands. It changes Slurm through `slurm`, and writes to the shared directory. What may be drained
is decided in `node.rules`.

    drain          drains a node: asks who holds it, asks the breaker, looks again, drains, looks
    own_drain      remembers our drain, and lifts it where it is unchanged
    shared_state   the files that all nodes share: the breaker's ledger and the marks
"""

# In the state of a node: when a person last returned it after a drain of ours. Hooks that drain
# nothing look whether it is there, and load nothing else for that.
RETURNED = "returned.json"
# There too: that this node is in quarantine. Its test may find what it was drained for.
QUARANTINE = "quarantine.json"
