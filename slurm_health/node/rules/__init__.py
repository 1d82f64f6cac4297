# SPDX-License-Identifier: Apache-2.0
"""From what a hook finds to what becomes of the node. Pure.

The hooks and the administrators' commands call it; `draining` performs what is decided here.

    finding        what a check of a node concludes, and how several become one
    settings       the hooks' tables in the site's file, with their defaults; patterns of nodes
    xid            what an Xid means for the node, by NVIDIA's catalogue
    kernel_lines   the lines of the kernel's log that count, and that no user can write
    telling_lines  which of them tell most, where there is room for few
    meaning        what an Xid, an SXid or such a line means, for a person who has met one
    breaker        how many nodes may be drained at once
    recovery       when a node that a hook drained may be resumed
    drain_note     the reason that a hook sets on a node, and how to recognise it
    repair         which step repairs a node next
    accusations    what an ended job's check says against a node, and marks; trusts nothing
"""
