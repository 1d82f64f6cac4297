# SPDX-License-Identifier: Apache-2.0
"""What root does on one node: the hooks, their checks, drains, repairs and notifications.

An error of a hook ends in exit code 0: a node that could not be measured stays in the pool.

    rules           decisions about a node, from the results of its checks. Pure
    checks          what the hooks measure on a node, one file per family
    site            the config file as the hooks read it, checks included
    run             chooses checks and runs them in children
    notify          sends events of a node to a command, or to URLs
    store           values in files: a node's own, and those that all nodes change
    shared          the directory that all nodes share: the breaker's ledger
    marks           accusations of nodes that no check of theirs confirms
    state           the record of a node's own drain
    held            processes that outlive a job, and what they wait for
    drain           takes a node out of the pool, and returns it
    log             the log of a hook
    hook            what prolog, epilog and health check share
    repair          resets, reboots and tests a node as far as its site allows
    slurm_drains    drains that Slurm sets by itself: explained, and lifted if that is safe
    hooks           prolog, epilog, health check, and the administrators' commands
    doctor          `slurm-health doctor`: is this site set up for the hooks?
"""

# The state of `state`, in root's own directory on the node. A hook without a drain only checks
# whether the file is there, and loads nothing for it.
STATE_FILE = "node.json"
