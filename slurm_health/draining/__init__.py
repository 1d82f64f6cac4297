# SPDX-License-Identifier: Apache-2.0
"""One way to take a node out and to give it back, for hooks and for administrators' jobs."""
