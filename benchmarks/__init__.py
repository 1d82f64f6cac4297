# SPDX-License-Identifier: Apache-2.0
"""Each performance claim as a command that prints its table."""
