# SPDX-License-Identifier: Apache-2.0
"""What a check on played GPUs waits for, counted."""
