# SPDX-License-Identifier: Apache-2.0
"""A node with hooks, for the tests below this directory."""

from tests.support.hooked_node import drained, node, rack, shared, slurm, story

__all__ = ["drained", "node", "rack", "shared", "slurm", "story"]
