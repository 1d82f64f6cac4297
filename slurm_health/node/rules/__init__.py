# SPDX-License-Identifier: Apache-2.0
"""Decisions about a node, from the results of its checks. Pure.

The hooks and the administrators' commands call it; `drain` and `repair` perform the decisions.

    finding        what a check of a node concludes, and how several become one
    settings       every setting of a site, with its default; patterns of nodes
    kernel_lines   the table of the kernel's lines, Xids and SXids: meaning, owner, remedy
    breaker        how many nodes may be drained at once
    recovery       when a node that a hook drained may be resumed
    drain_note     the reason that a hook sets on a node, and how to recognise it
    slurm_reasons  the table of Slurm's own reasons to drain a node
    slurm_drain    Slurm's own drains: what is known of one, and what lifts it
    repair         which step repairs a node next
    accusations    what an ended job's check says against a node, and marks; trusts nothing
"""
