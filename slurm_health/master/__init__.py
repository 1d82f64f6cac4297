# SPDX-License-Identifier: Apache-2.0
"""The process on the first node: one check, from the allocation to the verdict."""
