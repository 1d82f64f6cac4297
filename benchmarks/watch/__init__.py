# SPDX-License-Identifier: Apache-2.0
"""Whether a watch that no user asked for reports every hang, where it is, and no healthy job."""
