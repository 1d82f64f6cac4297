# SPDX-License-Identifier: Apache-2.0
"""From the journal to the master's next step. Pure."""
