# SPDX-License-Identifier: Apache-2.0
"""From what a hook finds to what becomes of the node. Pure."""
