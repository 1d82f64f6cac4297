# SPDX-License-Identifier: Apache-2.0
"""One way to take a node out of the pool, and one to give it back."""
