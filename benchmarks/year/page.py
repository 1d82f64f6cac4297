# SPDX-License-Identifier: Apache-2.0
"""The runs that the page has, and the tables that it makes of them. Pure: text in, text out.

What the command writes stands between two marks of the page, so that all around it is a person's:

    <!-- year: NAME -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from tabulate import tabulate

from benchmarks.year.measures import Mean, mean_of
from benchmarks.year.policies import COMPARED
from benchmarks.year.recording import Recording, counted
from benchmarks.year.results import Done, Doubt, Run

_MARKED = re.compile(r"(<!-- year: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
# What is shown of each policy, with how many digits.
_COLUMNS = (
    ("goodput", "useful of all %", 1),
    ("again_mean_min", "again, mean min", 0),
    ("strikes", "failures", 0),
    ("twice", "by a node again", 0),
    ("relapses_by_test", "relapses met by a test %", 0),
    ("withheld", "healthy withheld %", 2),
    ("swept_h", "swept node-h", 0),
    ("spare", "spares %", 1),
    ("false_drains", "false drains", 1),
    ("lemons", "lemons", 1),
)
_ALL = tuple(policy.name for policy in COMPARED)
_OURS = ("defaults", "burn-in", "best", "best+persons")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table of the page: these policies, each with so many seeds, compared with `base`.

    `days` is 0 for the recording's own length.
    """

    name: str
    nodes: int
    seeds: int
    policies: tuple[str, ...]
    doubt: Doubt = Doubt.NONE
    base: str = "plain"
    days: float = 0.0


_NOT_RUN = "Not run yet."
_FEW = ("plain", "defaults", "burn-in", "best+persons")
# In the order in which they are run: what most is said of comes first.
PARTS = (
    Part(name="1000 halved", nodes=1000, seeds=2, policies=_FEW, doubt=Doubt.HALVED),
    Part(
        name="variants",
        nodes=1000,
        seeds=1,
        policies=("defaults", "burn-in-90min", "burn-in-6h", "burn-in", "best", "best+persons"),
        base="defaults",
    ),
    Part(name="400", nodes=400, seeds=2, policies=_FEW),
    Part(name="1000", nodes=1000, seeds=4, policies=("plain", "lemon-cut", *_FEW[1:])),
    Part(
        name="1000 quick",
        nodes=1000,
        seeds=3,
        policies=("plain", "lemon-cut", "defaults"),
        doubt=Doubt.QUICK,
    ),
    Part(name="1000 others", nodes=1000, seeds=1, policies=_ALL),
    Part(name="4096", nodes=4096, seeds=3, policies=("plain", "defaults", "burn-in")),
    Part(name="16384", nodes=16384, seeds=1, policies=("plain", "defaults"), days=30.0),
)


def runs(*, days: float = 0.0) -> Iterator[Run]:
    """Yield the runs of the page, each once; `days` for a shorter year."""
    yield from dict.fromkeys(
        Run(policy=policy, nodes=part.nodes, seed=seed, doubt=part.doubt, days=days or part.days)
        for part in PARTS
        for seed in range(part.seeds)
        for policy in part.policies
    )


def blocks(done: Sequence[Done]) -> dict[str, str]:
    """Return what stands between the marks of the page, by name, of what has been run."""
    tables = {part.name: _table_of(done, part) for part in PARTS}
    cost = "\n".join(_cost(done))
    return {**tables, "goals": _goals(done), "cost": cost}


def facts(recording: Recording) -> dict[str, str]:
    """Return what the page says of the recording itself."""
    found = counted(recording)
    share = 100 * found.relapses / max(found.repairs, 1)
    text = (
        f"{found.faults} faults, {1000 * found.per_node_day:.1f} in 1,000 node-days. Of"
        f" {found.repairs} repairs, {found.relapses} ({share:.0f} %) were followed by another"
        f" fault within 28 days, **half of these within {found.median_gap_h:.0f} hours**;"
        f" {found.again} faults were the same as the one before."
    )
    return {"recording": text}


def filled(text: str, new: Mapping[str, str]) -> str:
    """Return a page with what is new between its marks; what has no new text stays."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}{new[name]}\n{end}" if name in new else match[0]

    return _MARKED.sub(replaced, text)


def marked(text: str) -> dict[str, str]:
    """Return what stands between the marks of a page, by name."""
    return {match[2]: match[0][len(match[1]) : -len(match[3])].strip("\n")
            for match in _MARKED.finditer(text)}  # fmt: skip


def text(done: Sequence[Done], *, base: str) -> str:
    """Return a table for each size of some runs, for a terminal."""
    found = []
    for nodes in sorted({each.run.nodes for each in done}):
        here = [each for each in done if each.run.nodes == nodes]
        names = tuple(dict.fromkeys(each.run.policy for each in here))
        for doubt in dict.fromkeys(each.run.doubt for each in here):
            part = Part(name="", nodes=nodes, seeds=99, policies=names, doubt=doubt, base=base)
            found.append(f"## {nodes:,} nodes {doubt.value}\n\n{_table_of(here, part)}\n")
    return "\n".join(found)


def of(done: Sequence[Done], policy: str, part: Part) -> list[Done]:
    """Return the runs of a policy in a part of the page, by seed."""
    found = [
        each
        for each in done
        if (each.run.policy, each.run.nodes, each.run.doubt) == (policy, part.nodes, part.doubt)
        and each.run.seed < part.seeds
    ]
    return sorted(found, key=lambda each: each.run.seed)


def _table_of(done: Sequence[Done], part: Part) -> str:
    rows = []
    for policy in part.policies:
        here = of(done, policy, part)
        if not here:
            continue
        ratio = mean_of([each.figures["ratio"] for each in here])
        others = [
            f"{mean(each.figures[name] for each in here):,.{digits}f}"
            for name, _, digits in _COLUMNS
        ]
        gain = "" if policy == part.base else _gain(here, of(done, part.base, part))
        rows.append([policy, len(here), _ranged(ratio), gain, *others])
    heads = ["policy", "seeds", "useful of allocated %", f"against {part.base}, points"]
    heads += [head for _, head, _ in _COLUMNS]
    return (
        tabulate(rows, headers=heads, tablefmt="pipe", disable_numparse=True) if rows else _NOT_RUN
    )


def _ranged(found: Mean, sign: str = "") -> str:
    half = f" ± {found.half:.1f}" if found.half is not None else ""
    return f"{found.value:{sign}.1f}{half}"


def _gains(done: Sequence[Done], base: Sequence[Done]) -> list[float]:
    by_seed = {each.run.seed: each.figures["ratio"] for each in base}
    return [
        each.figures["ratio"] - by_seed[each.run.seed] for each in done if each.run.seed in by_seed
    ]


def _gain(done: Sequence[Done], base: Sequence[Done]) -> str:
    gains = _gains(done, base)
    return _ranged(mean_of(gains), "+") if gains else ""


_GOAL_HEADS = (
    "nodes",
    "policy",
    "5 points over plain",
    "60 % of relapses by a test",
    "1 % withheld at most",
    "never worse than plain",
)


def _goals(done: Sequence[Done]) -> str:
    """Return which goals hold, for each of our policies in each table against plain."""
    rows: dict[tuple[int, Doubt, str], list[str]] = {}
    order = list(Doubt)
    for part in sorted(PARTS, key=lambda each: (order.index(each.doubt), each.nodes, -each.seeds)):
        if part.base != "plain":
            continue
        for policy in [name for name in part.policies if name in _OURS]:
            here = of(done, policy, part)
            gains = _gains(here, of(done, "plain", part))
            if not gains or (part.nodes, part.doubt, policy) in rows:
                continue
            met = mean(each.figures["relapses_by_test"] for each in here)
            withheld = mean(each.figures["withheld"] for each in here)
            gain = mean_of(gains)
            rows[part.nodes, part.doubt, policy] = [
                ", ".join(filter(None, (f"{part.nodes:,}", part.doubt.value, _length(part)))),
                policy,
                f"{_shown(gain, 5.0)}: {_ranged(gain, '+')}",
                f"{'yes' if met >= 60 else 'no'}: {met:.0f}",
                f"{'yes' if withheld <= 1 else 'no'}: {withheld:.2f}",
                "yes" if min(gains) >= 0 else f"no: {min(gains):+.1f} with one seed",
            ]
    return tabulate(
        list(rows.values()), headers=_GOAL_HEADS, tablefmt="pipe", disable_numparse=True
    )


def _length(part: Part) -> str:
    return f"{part.days:g} days" if part.days else ""


def _shown(found: Mean, goal: float) -> str:
    """Return whether a mean is shown to reach a goal: with all of its interval, or not."""
    if found.half is None:
        return "one seed"
    if found.value - found.half >= goal:
        return "yes"
    return "no" if found.value + found.half < goal else "not shown"


def _cost(done: Sequence[Done]) -> Iterator[str]:
    """Yield what a run of each size took of a processor."""
    for nodes in sorted({each.run.nodes for each in done}):
        took_s = sorted(each.took_s for each in done if each.run.nodes == nodes)
        runs_of = "1 run" if len(took_s) == 1 else f"{len(took_s)} runs"
        yield f"- {nodes:,} nodes: {runs_of}, {took_s[0]:.0f} to {took_s[-1]:.0f} s of a processor"
