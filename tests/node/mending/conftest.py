# SPDX-License-Identifier: Apache-2.0
"""Nodes with hooks, for the tests beside this file."""

from __future__ import annotations

from tests.support.hooked_node import node, rack, shared, slurm

__all__ = ["node", "rack", "shared", "slurm"]
