# SPDX-License-Identifier: Apache-2.0
"""What a cluster's history advises: spares for jobs, nodes to look at, and how much is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from slurm_health.fleet.history.answer import Lemons
from slurm_health.fleet.standing.standing import Standing
from slurm_health.preflight.decide.spares import (
    CONFIDENCE,
    LEAST_HOURS,
    LEAST_STARTS,
    RECORDED_PER_NODE_DAY,
    RISK,
    Spares,
    interval,
    rate_of,
    spares_for,
)
from slurm_health.records.standings import MOST, Counted, Reliability
from slurm_health.records.text import counted as many
from slurm_health.report.layout import Page

VERSION = 1
_HEADS = ("NODES", "--spares", "FEWEST", "MOST", "--keep-spares", "FEWEST", "MOST")
_LOOK_AT = 10  # nodes that are named with their reason; JSON has all
_SIZES = 4  # times as many nodes from row to row
_HOURS_OF_1000_DAYS = 24_000.0


@dataclass(frozen=True, kw_only=True)
class AdviceQuestion:
    """Which jobs are asked about: `nodes` of each, those up to the cluster's size if none is given.

    `hours` are those of the script, `risk` how likely a job may have more bad nodes than spares.
    """

    nodes: Sequence[int] = ()
    hours: float = 24.0
    risk: float = RISK


def advice_text(found: Sequence[Lemons], asked: AdviceQuestion, page: Page) -> str:
    """Return the advice for each cluster; one of which nothing is known, only if it is alone."""
    if not found:
        return "no check is in the journals that you may read; --journal=DIR names others\n"
    told = [each for each in found if each.standings] or found
    return "\n".join("\n".join(_lines(each, asked, page)) + "\n" for each in told)


def _lines(found: Lemons, asked: AdviceQuestion, page: Page) -> Iterable[str]:
    starts, hours = found.rates.starts, found.rates.hours
    nodes = len(found.standings)
    lemons = sum(each.level is Reliability.LEMON for each in found.standings)
    apart = f", {many(lemons, 'lemon')} among them that the counts leave out" if lemons else ""
    yield from page.paragraph(
        f"{found.cluster}: {many(nodes, 'node')} checked in the last {found.days:g} days{apart}:"
        f" {starts.exposure:.0f} starts of a job on a node, {hours.exposure:.0f} hours of a script"
        " on a node"
    )
    at_start = _rate(starts, 100, "starts", "bad at the start of a job")
    yield from page.paragraph(_doubted(at_start, starts, LEAST_STARTS, "starts"))
    failed = _rate(hours, _HOURS_OF_1000_DAYS, "node-days", "failed under a script", told=1000)
    yield from page.paragraph(_doubted(failed, hours, LEAST_HOURS, "hours"))
    yield ""
    rows = [_HEADS, *(_row(each) for each in _jobs(found, asked))]
    yield from page.table(rows, align=("right",) * len(_HEADS))
    yield from page.paragraph(
        f"with so many, at most {100 * asked.risk:.3g} of 100 jobs meet more bad nodes than spares;"
        f" --keep-spares for a script of {asked.hours:g} h; FEWEST and MOST by the ends of the"
        " intervals"
    )
    yield ""
    yield from _to_look_at(found.standings, page)


def _rate(counted: Counted, per: float, unit: str, what: str, told: float | None = None) -> str:
    low, high = (limit * per for limit in interval(counted))
    of = many(counted.events, "time") if counted.events else "never"
    on = f", on {many(counted.nodes, 'node')}" if counted.events else ""
    sure = f"{CONFIDENCE:.0%} interval {low:.2g} to {high:.2g}"
    rate = f"{rate_of(counted) * per:.2g} in {told or per:g} {unit}"
    return f"{what}: {of}{on}; {rate} ({sure})" if counted.exposure else f"{what}: not known"


def _doubted(text: str, counted: Counted, least: float, unit: str) -> str:
    if counted.exposure >= least:
        return text
    return (
        f"{text}; too little for advice ({counted.exposure:.0f} of {least:.0f} {unit}): the spares"
        f" below take {1000 * RECORDED_PER_NODE_DAY:g} faults in 1,000 node-days, as recorded on"
        " another cluster"
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    nodes: int
    at_start: Spares
    kept: Spares


def _jobs(found: Lemons, asked: AdviceQuestion) -> list[_Job]:
    sizes = asked.nodes or _sizes(len(found.standings))
    return [
        _Job(
            nodes=nodes,
            at_start=spares_for(found.rates, nodes, risk=asked.risk),
            kept=spares_for(found.rates, nodes, hours=asked.hours, risk=asked.risk),
        )
        for nodes in sizes
    ]


def _sizes(nodes: int) -> list[int]:
    """Return sizes of jobs that leave nodes of a cluster to spare."""
    sizes, size = [], 1
    while size * _SIZES < nodes:
        size *= _SIZES
        sizes.append(size)
    return sizes or [max(nodes - 1, 1)]


def _row(job: _Job) -> list[str]:
    both = [
        (str(each.count), str(each.fewest), str(each.most)) for each in (job.at_start, job.kept)
    ]
    return [str(job.nodes), *both[0], *both[1]]


def _to_look_at(standings: Sequence[Standing], page: Page) -> Iterable[str]:
    named = [each for each in standings if _deserves_a_look(each)]
    once = sum(each.level is Reliability.SUSPECT for each in standings if each not in named)
    if named:
        yield "look at"
    for each in named[:_LOOK_AT]:
        yield from page.paragraph(f"  {each.node}: {each.level.value}, {each.reason}")
    if len(named) > _LOOK_AT:
        yield from page.paragraph(f"  and {len(named) - _LOOK_AT} more: slurm-health lemons")
    clear = sum(each.level is Reliability.CLEAR for each in standings)
    others = "other nodes" if named else "no node needs a look"
    yield from page.paragraph(
        f"{others}: {once} with one bad job, {clear} with none in ten or more,"
        f" {len(standings) - len(named) - once - clear} with too few to tell"
    )


def _deserves_a_look(standing: Standing) -> bool:
    """Tell whether something spoke against a node more than once."""
    return standing.level in MOST and standing.spoiled > 1


def advice_json(found: Sequence[Lemons], asked: AdviceQuestion, unread: Mapping[str, int]) -> str:
    """Return the advice for each cluster, and all figures that it rests on."""
    clusters = [
        {
            "cluster": each.cluster,
            "days": each.days,
            "nodes": len(each.standings),
            "starts": _counted(each.rates.starts, LEAST_STARTS),
            "hours": _counted(each.rates.hours, LEAST_HOURS),
            "jobs": [msgspec.to_builtins(job) for job in _jobs(each, asked)],
            "look_at": [
                msgspec.to_builtins(standing)
                for standing in each.standings
                if _deserves_a_look(standing)
            ],
        }
        for each in found
    ]
    document = {
        "version": VERSION,
        "risk": asked.risk,
        "hours": asked.hours,
        "recorded_per_node_day": RECORDED_PER_NODE_DAY,
        "clusters": clusters,
        "unread": dict(unread),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _counted(counted: Counted, least: float) -> dict[str, Any]:
    """Return a count with its rate; there is none where there was no exposure."""
    fields: dict[str, Any] = msgspec.to_builtins(counted)
    low, high = interval(counted) if counted.exposure else (None, None)
    rate = rate_of(counted) if counted.exposure else None
    return fields | {"rate": rate, "low": low, "high": high, "enough": counted.exposure >= least}
