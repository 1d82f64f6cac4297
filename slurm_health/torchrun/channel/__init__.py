# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a check talk that share no directory: over TCP, with node 0.

Node 0 has the journal. What another node's agent writes goes there line by line, and of the
master's words each node gets those that concern it. Agents and master know nothing of this: an
agent has a directory with its own file and its orders, as anywhere else.

    messages     what is said, and how it is proven who says it
    connection   lines over a socket, bounded and never waited for
    admission    node 0's port: who comes in, and who does not
    peers        the other nodes as node 0 knows them: their files, and which of the master's words
                 each is sent
    node_zero    node 0's end: a launcher of agents that are elsewhere
    other_node   another node's end: connects, and connects again
"""
