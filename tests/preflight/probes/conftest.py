# SPDX-License-Identifier: Apache-2.0
"""These tests load torch themselves; without it only those of light probes are collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_[!l]*.py"]
