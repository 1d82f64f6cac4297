# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what becomes of the job and its nodes. Pure."""
