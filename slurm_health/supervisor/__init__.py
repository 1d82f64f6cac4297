# SPDX-License-Identifier: Apache-2.0
"""The batch script's process: runs the check, then the user's script, signals passed through."""
