# SPDX-License-Identifier: Apache-2.0
"""The process on every node: starts the workers, gives them rounds, writes what they found.

Loads no torch; its workers do.
"""
