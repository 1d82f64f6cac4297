# SPDX-License-Identifier: Apache-2.0
"""Who runs with whom in the next round.

A round is a set of pairs, each node in at most one. Undecided nodes meet trusted ones they have
not met; what is left over meets among itself, across leaf switches where they are known, which
is free evidence about the fabric. Nodes are numbers here, so that names change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

_EXHAUSTIVE = 10  # up to this many nodes every possible round is looked at (945 of them)

_NOBODY = -1  # who pairs with nobody sits out

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PlanState:
    """What the planner knows; all sequences are by node number.

    `active` may be tested; `undecided` are the ones a round is wanted for, `trusted` those whose
    word counts. `leaf` is the number of each node's leaf switch, or -1. `repeats` are pairs to be
    tested once more although they have met, because both ends are well and the pair was not.
    A suspect on one of the `suspect_leaves` is tested inside it, where the uplink plays no part.
    """

    active: tuple[int, ...]
    risk: Sequence[float]
    undecided: AbstractSet[int]
    trusted: AbstractSet[int]
    met: Sequence[AbstractSet[int]]
    byes: Sequence[int]
    leaf: Sequence[int]
    repeats: tuple[Pair, ...] = ()
    seed: int = 0
    round_index: int = 0
    tested_in_leaf: AbstractSet[int] = field(default_factory=frozenset)
    suspect_leaves: AbstractSet[int] = field(default_factory=frozenset)


def plan_round(standing: PlanState) -> list[Pair]:
    """Return the pairs of the next round, the same for the same standing."""
    rng = random.Random(standing.seed * 1_000_003 + standing.round_index)  # noqa: S311 - not a secret
    pairs: list[Pair] = []
    free = set(standing.active)
    for one, other in standing.repeats:
        if {one, other} <= free:
            pairs.append((one, other))
            free -= {one, other}
    if not standing.trusted:
        circle = _circle_round(standing, free)
        if circle is not None:
            return _tidy([*pairs, *circle])
    order = [node for node in standing.active if node in free]
    rng.shuffle(order)
    if len(order) <= _EXHAUSTIVE:
        seats = [*order, _NOBODY] if len(order) % 2 else order
        best = _best_round(standing, seats)
        return _tidy([*pairs, *(pair for pair in best if _NOBODY not in pair)])
    if len(order) % 2:
        order.remove(_bye(standing, order))
    return _tidy([*pairs, *_greedy_round(standing, order, rng)])


def _tidy(pairs: Iterable[Pair]) -> list[Pair]:
    return sorted((min(pair), max(pair)) for pair in pairs)


def _bye(standing: PlanState, order: Sequence[int]) -> int:
    """Return who sits out: the most trusted of those who did so least."""
    return min(
        order,
        key=lambda node: (
            node in standing.undecided,
            standing.byes[node],
            node not in standing.trusted,
            standing.risk[node],
        ),
    )


def circle(order: Sequence[int], turn: int) -> list[Pair]:
    """Return turn `turn` of the round robin: over n - 1 turns (n if odd) everybody meets once."""
    if not order:
        return []
    seats: list[int | None] = [*order] if len(order) % 2 == 0 else [*order, None]
    rest = seats[1:]
    turn %= max(len(rest), 1)
    table = [seats[0], *rest[turn:], *rest[:turn]]
    couples = [(table[seat], table[-1 - seat]) for seat in range(len(table) // 2)]
    return [(one, other) for one, other in couples if one is not None and other is not None]


def _circle_round(standing: PlanState, free: AbstractSet[int]) -> list[Pair] | None:
    """Return the next turn of a round robin in which nobody meets anybody again, if there is one.

    While nobody is trusted, this alone guarantees that two good nodes meet sooner or later.
    """
    if any(leaf >= 0 for leaf in standing.leaf) and standing.round_index == 0:
        return None
    order = [node for node in standing.active if node in free]
    random.Random(standing.seed).shuffle(order)  # noqa: S311 - not a secret
    order.sort(key=lambda node: -standing.risk[node] if standing.round_index == 0 else 0)
    pairs = circle(order, standing.round_index)
    if any(other in standing.met[one] for one, other in pairs):
        return None
    return pairs


def _worth(standing: PlanState, one: int, other: int) -> float:
    """Return how much is learnt from testing `one` with `other`, who may be nobody."""
    if _NOBODY in (one, other):
        node = max(one, other)
        return -20.0 * standing.byes[node] - (node in standing.undecided) * 60.0
    worth = 0.0 if other in standing.met[one] else 100.0
    doubtful = (one in standing.undecided) + (other in standing.undecided)
    trusted = (one in standing.trusted) + (other in standing.trusted)
    if doubtful == 1 and trusted == 1:
        worth += 30.0 + max(standing.risk[one], standing.risk[other])
    elif doubtful == 1:
        worth += 5.0
    elif doubtful == 2:
        worth -= 10.0
    return worth + _fabric_worth(standing, one, other)


def _fabric_worth(standing: PlanState, one: int, other: int) -> float:
    """Return the preference for a test inside the leaf first and across leaves afterwards."""
    if standing.leaf[one] < 0 or standing.leaf[other] < 0:
        return 0.0
    inside = standing.leaf[one] == standing.leaf[other]
    known = (one in standing.tested_in_leaf) + (other in standing.tested_in_leaf)
    return 3.0 * (2 - known) if inside else 3.0 * known


def _best_round(standing: PlanState, order: Sequence[int]) -> list[Pair]:
    """Return the most valuable of all perfect matchings of a few nodes."""
    if not order:
        return []
    best: list[Pair] = []
    best_worth = float("-inf")
    first, rest = order[0], order[1:]
    for partner in rest:
        others = _best_round(standing, [node for node in rest if node != partner])
        pairs = [(first, partner), *others]
        worth = sum(_worth(standing, *pair) for pair in pairs)
        if worth > best_worth:
            best, best_worth = pairs, worth
    return best


def _greedy_round(standing: PlanState, order: list[int], rng: random.Random) -> list[Pair]:
    """Return a good matching of many nodes: suspects with trusted nodes, then the rest."""
    free = dict.fromkeys(order)
    suspects = sorted(
        (node for node in order if node in standing.undecided),
        key=lambda node: -standing.risk[node],
    )
    pool = [node for node in order if node in standing.trusted and node not in standing.undecided]
    pairs = _witnessed(standing, suspects, pool)
    for pair in pairs:
        for node in pair:
            del free[node]
    if any(standing.leaf[node] >= 0 for node in free) and standing.round_index > 0:
        across = _across_leaves(standing, list(free))
        pairs += across
        for pair in across:
            for node in pair:
                del free[node]
    elif standing.round_index == 0:
        inside = _inside_leaves(standing, list(free))
        pairs += inside
        for pair in inside:
            for node in pair:
                del free[node]
    rest = list(free)
    rng.shuffle(rest)
    pairs += _unmet(standing, rest)
    return _repair(standing, pairs)


def _witnessed(standing: PlanState, suspects: Sequence[int], pool: list[int]) -> list[Pair]:
    """Return each suspect with a trusted node it has not met, as far as these suffice."""
    pairs: list[Pair] = []
    by_leaf: dict[int, list[int]] = {}
    for node in pool:
        by_leaf.setdefault(standing.leaf[node], []).append(node)
    taken: set[int] = set()
    for suspect in suspects:
        home = standing.leaf[suspect]
        partner = None
        untried = suspect not in standing.tested_in_leaf or home in standing.suspect_leaves
        if home >= 0 and untried:
            partner = _first_unmet(standing, suspect, by_leaf.get(home, []), taken)
        if partner is None:
            partner = _first_unmet(standing, suspect, pool, taken)
        if partner is not None:
            taken.add(partner)
            pairs.append((suspect, partner))
    return pairs


def _first_unmet(
    standing: PlanState, node: int, pool: list[int], taken: AbstractSet[int]
) -> int | None:
    """Return a free node of the pool that `node` has not met; forget the taken ones on the way."""
    while pool and pool[-1] in taken:
        pool.pop()
    for candidate in reversed(pool):
        if candidate not in taken and candidate not in standing.met[node]:
            return candidate
    return None


def _inside_leaves(standing: PlanState, free: Sequence[int]) -> list[Pair]:
    """Return pairs inside each leaf; an odd one is left over."""
    by_leaf: dict[int, list[int]] = {}
    for node in free:
        if standing.leaf[node] >= 0:
            by_leaf.setdefault(standing.leaf[node], []).append(node)
    return [
        pair
        for members in by_leaf.values()
        for pair in zip(members[::2], members[1::2], strict=False)
    ]


def _across_leaves(standing: PlanState, free: Sequence[int]) -> list[Pair]:
    """Return pairs across leaves that spread over as many pairs of leaves as possible.

    The round robin is played by the leaves; each turn takes one node of either leaf. The turns
    go on from round to round, so that with m nodes per leaf m pairs of leaves are seen a round.
    """
    by_leaf: dict[int, list[int]] = {}
    for node in free:
        if standing.leaf[node] >= 0:
            by_leaf.setdefault(standing.leaf[node], []).append(node)
    leaves = sorted(by_leaf)
    largest = max((len(members) for members in by_leaf.values()), default=0)
    pairs: list[Pair] = []
    start = (standing.round_index - 1) * largest
    for turn in range(start, start + max(len(leaves), largest)):
        for one, other in circle(leaves, turn):
            here, there = by_leaf[one], by_leaf[other]
            if here and there and there[-1] not in standing.met[here[-1]]:
                pairs.append((here.pop(), there.pop()))
    return pairs


def _unmet(standing: PlanState, order: Sequence[int]) -> list[Pair]:
    """Return pairs of nodes that have not met; whoever remains pairs up anyhow."""
    waiting = list(order)
    pairs: list[Pair] = []
    stuck: list[int] = []
    while waiting:
        node = waiting.pop()
        for place in range(len(waiting) - 1, -1, -1):
            if waiting[place] not in standing.met[node]:
                pairs.append((node, waiting.pop(place)))
                break
        else:
            stuck.append(node)
    pairs.extend(zip(stuck[::2], stuck[1::2], strict=False))
    return pairs


def _repair(standing: PlanState, pairs: list[Pair]) -> list[Pair]:
    """Exchange partners between a repeated pair and another one, where then neither repeats."""
    for place, (one, other) in enumerate(pairs):
        if other not in standing.met[one]:
            continue
        for elsewhere, (left, right) in enumerate(pairs):
            if elsewhere == place:
                continue
            swaps = (((one, left), (other, right)), ((one, right), (other, left)))
            fitting = [swap for swap in swaps if all(b not in standing.met[a] for a, b in swap)]
            if fitting:
                pairs[place], pairs[elsewhere] = fitting[0]
                break
    return pairs
