# SPDX-License-Identifier: Apache-2.0
"""A node with hooks, for the tests beside this file."""

from tests.support.hooked_node import node, shared, slurm

__all__ = ["node", "shared", "slurm"]
