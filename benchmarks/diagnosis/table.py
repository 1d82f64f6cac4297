# SPDX-License-Identifier: Apache-2.0
"""The confusion matrix, and how soon a cause is found. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.diagnosis.causes import CAUSES, Cause
from benchmarks.diagnosis.judge import Judged

_NOTHING = "–"  # noqa: RUF001


def table(runs: Sequence[Judged]) -> str:
    """Return the matrix, the times, the runs that were wrong, and the figures that count."""
    causes = [cause for cause in CAUSES if any(run.plan.cause is cause for run in runs)]
    parts = [_matrix(causes, runs), _times(causes, runs)]
    wrong = [f"{run.plan}: {'; '.join(run.wrong)} {run.evidence}" for run in runs if run.wrong]
    if wrong:
        parts.append("\n".join(wrong))
    return "\n\n".join([*parts, _sums(runs)])


def _matrix(causes: Sequence[Cause], runs: Sequence[Judged]) -> str:
    rows = []
    for cause in causes:
        own = [run for run in runs if run.plan.cause is cause]
        named = Counter(run.named for run in own)
        rows.append(
            [
                cause.name,
                len(own),
                ", ".join(f"{name} {count}" for name, count in named.most_common()),
                f"{sum(run.cause_right for run in own)} of {len(own)}",
                f"{sum(run.node_right for run in own)} of {len(own)}",
                sum(bool(run.accused) for run in own),
            ]
        )
    headers = ["cause", "runs", "named", "cause right", "node right", "healthy node accused"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _times(causes: Sequence[Cause], runs: Sequence[Judged]) -> str:
    rows = []
    for cause in causes:
        own = [run for run in runs if run.plan.cause is cause]
        rows.append(
            [
                cause.name,
                cause.title,
                _spread([run.found_s for run in own]),
                _spread([run.again_s for run in own]),
            ]
        )
    headers = ["cause", "what is done", "found after, s", "training again after, s"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(times_s: Sequence[float | None]) -> str:
    """Return median and maximum."""
    known = [each for each in times_s if each is not None]
    if not known:
        return _NOTHING
    return f"{statistics.median(known):.0f} (max {max(known):.0f})"


def _sums(runs: Sequence[Judged]) -> str:
    both = sum(run.cause_right and run.node_right for run in runs)
    accused = sum(bool(run.accused) for run in runs)
    share = f" ({both / len(runs):.0%})" if runs else ""
    return (
        f"{len(runs)} runs; cause and node right in {both}{share};"
        f" a healthy node accused in {accused}"
    )
