# SPDX-License-Identifier: Apache-2.0
"""Mends a node whose fault root's own checks have confirmed, by the steps that its site allows.

The health check asks what is next and begins it; what takes long is a process of its own. What is
next is decided in `node.rules.mending`. Nothing is done to a node that somebody else has drained,
whose note a person has touched, or on which a job is.

    mend         what the health check of a drained node does: the next step, or none
    perform      a reset of GPUs, or a reload of the driver, in a process of its own
    quarantine   a node in a reservation of root's, in which a job tests it, and how that ends
    whose        whether a node is still ours, asked again before anything is done to it
    ledger       the steps of all nodes, in the directory that they share
"""
