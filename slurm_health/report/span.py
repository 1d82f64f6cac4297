# SPDX-License-Identifier: Apache-2.0
"""The picture of when a check did what, as numbers: places and widths in percent of its time."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_health.report.charts import Label, Mark
from slurm_health.report.model import RunReport


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a check did what: a bar for each round and a mark for each event, in rows."""

    bars: tuple[Mark, ...]
    ticks: tuple[Label, ...]


def span_of(run: RunReport) -> Span | None:
    """Return when a check did what, None where nothing is known of it."""
    rows = [
        (each.after_s, each.duration_s, f"round {each.round} {each.phase}".rstrip(), "round")
        for each in run.each_round
    ]
    if run.duration_s is not None:
        rows.insert(0, (0.0, run.duration_s, "check, to its verdict", "check"))
    acts = [event for event in run.timeline if event.what.startswith("action_done")]
    rows += [(event.after_s, 0.0, f"{event.action} done", "act") for event in acts]
    if not rows:
        return None
    end_s = max(after_s + (took_s or 0.0) for after_s, took_s, _, _ in rows) or 1.0
    scale = 100 / end_s
    bars = [
        Mark(
            x=round(max(0.0, after_s) * scale, 1),
            y=number,
            width=round((took_s or 0.0) * scale, 1),
            style=style,
            title=f"{name}, {took_s:.1f} s" if took_s else f"{name}, at {after_s:.1f} s",
        )
        for number, (after_s, took_s, name, style) in enumerate(rows)
    ]
    ticks = [
        Label(at=round(share * 100, 1), text=f"{share * end_s:.1f} s")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return Span(bars=tuple(bars), ticks=tuple(ticks))
