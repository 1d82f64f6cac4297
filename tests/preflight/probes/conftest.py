# SPDX-License-Identifier: Apache-2.0
"""These tests load torch themselves; without it there is nothing to collect."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
