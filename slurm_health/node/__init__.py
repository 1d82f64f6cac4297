# SPDX-License-Identifier: Apache-2.0
"""What root does on one node: its hooks, what they check, and what becomes of the node.

Their own errors end in exit code 0: what could not be measured takes no node out of the pool.

    rules           what a hook finds -> what becomes of the node. Pure
    checks          what the hooks measure on a node, one file per family
    site            the config file as the hooks read it, checks included
    run             chooses checks and runs them, each in a child
    passes          that a node has passed its checks lately: said by root, read by everybody
    notify          sends what happens to a node to a command, or to URLs
    store           values in files: a node's own, and those that all nodes change
    shared          what all nodes keep together: the breaker's ledger
    marks           accusations of nodes that no check of theirs confirms
    state           what a node keeps about its own drains
    drain           takes a node out of the pool, and returns it
    repair          resets, reboots and tests a node as far as its site allows
    hooks           prolog, epilog, health check, and the administrators' commands
    doctor          `slurm-health doctor`: is this site set up for the hooks?
"""

# In the directory of root's own on each node: what `drain` keeps there. Hooks that drain nothing
# look whether it is there, and load nothing else for that.
STATE_FILE = "node.json"
