# SPDX-License-Identifier: Apache-2.0
"""What the log says of a round that has ended: the seconds that it took each node."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from slurm_health.records.nodeset import fold
from slurm_health.records.records import NodeReported

_MOST_NODES = 8  # each by name; of more, the slowest few and what was usual
_SLOWEST = 3


def took_text(reports: Mapping[str, NodeReported], silent: list[str]) -> str:
    """Return `n1 2.1 s, n2 2.2 s; no answer from n3`; `silent` are those that did not report."""
    took_s = {
        node: report.elapsed_ms / 1000 for node, report in reports.items() if node not in silent
    }
    slowest = sorted(took_s, key=lambda node: -took_s[node])[:_SLOWEST]
    many = len(took_s) > _MOST_NODES
    named = slowest if many else sorted(took_s)
    parts = [", ".join(f"{node} {took_s[node]:.1f} s" for node in named)] if named else []
    if many:
        parts.append(f"median of {len(took_s)} nodes {median(took_s.values()):.1f} s")
    if silent:
        parts.append(f"no answer from {fold(silent)}")
    return "; ".join(parts) or "nobody reported"
