# SPDX-License-Identifier: Apache-2.0
"""How soon hangs of a real training are reported, and whether a healthy job is ever called hung."""
