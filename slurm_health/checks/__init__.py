# SPDX-License-Identifier: Apache-2.0
"""Node-local checks: one file per family, `collect()` apart from `judge()`."""
