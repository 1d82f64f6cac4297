# SPDX-License-Identifier: Apache-2.0
"""Tells those whom the site's file names what has happened to nodes.

No hook waits for it: a process of its own takes what hooks have left in `event_queue`, puts it
together with what other nodes have, and sends it. What is told, and when, is decided in
`node.rules`.

    start      starts the process, where something waits
    deliver    takes this node's events to the shared directory, and sends what is due from there
    send       one message to one target: a command, or a webhook
"""
