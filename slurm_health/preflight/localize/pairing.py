# SPDX-License-Identifier: Apache-2.0
"""Pairs for the next round.

A round is a set of pairs, each node in at most one. Undecided nodes meet trusted ones they have not
met. The remaining nodes meet among themselves, across known leaf switches, which is free evidence
about the fabric. Nodes are numbers here, so that names change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

_EXHAUSTIVE = 10  # up to this many nodes the planner compares every possible round (945 of them)
_BYE = -1  # the partner of a node that sits out

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What the next round is for; all sequences are by node number.

    `active` nodes may be tested. `undecided` are the nodes that need a round, `trusted` the
    credible witnesses. `leaf` is the number of each node's leaf switch, or -1. `repeats` are pairs
    to test once more although they have met, because both ends are well and the pair was not. A
    suspect on one of the `suspect_leaves` is tested inside it, where the uplink plays no part.
    `shared_only`: nothing is in doubt, and it costs little to have other partners meet.
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
    shared_only: bool = False


def plan_round(request: RoundRequest) -> list[Pair]:
    """Return the pairs of the next round, the same for the same request."""
    rng = random.Random(request.seed * 1_000_003 + request.round_index)  # noqa: S311 - not a secret
    pairs: list[Pair] = []
    free = set(request.active)
    for one, other in request.repeats:
        if {one, other} <= free:
            pairs.append((one, other))
            free -= {one, other}
    rest = None if request.trusted else _new_partners(request, free)
    if rest is None:
        order = [node for node in request.active if node in free]
        rng.shuffle(order)
        if len(order) <= _EXHAUSTIVE:
            best = _best_round(request, [*order, _BYE] if len(order) % 2 else order)
            rest = [pair for pair in best if _BYE not in pair]
        else:
            if len(order) % 2:  # the most trusted of the nodes with the fewest byes sits out
                bye = min(
                    order,
                    key=lambda node: (
                        node in request.undecided,
                        request.byes[node],
                        node not in request.trusted,
                        request.risk[node],
                    ),
                )
                order.remove(bye)
            rest = _greedy_round(request, order, rng)
    return sorted((min(pair), max(pair)) for pair in [*pairs, *rest])


def round_robin_pairs(order: Sequence[int], turn: int) -> list[Pair]:
    """Return a turn of the round robin: in n - 1 turns (n if odd) all nodes meet once."""
    if not order:
        return []
    seats: list[int | None] = [*order] if len(order) % 2 == 0 else [*order, None]
    rest = seats[1:]
    turn %= max(len(rest), 1)
    table = [seats[0], *rest[turn:], *rest[:turn]]
    couples = [(table[seat], table[-1 - seat]) for seat in range(len(table) // 2)]
    return [(one, other) for one, other in couples if one is not None and other is not None]


def _new_partners(request: RoundRequest, free: AbstractSet[int]) -> list[Pair] | None:
    """Return the next turn of a round robin in which no pair meets again, None if there is none.

    While no node is trusted, only this guarantees that two good nodes meet sooner or later.
    """
    if any(leaf >= 0 for leaf in request.leaf) and request.round_index == 0:
        return None
    order = [node for node in request.active if node in free]
    random.Random(request.seed).shuffle(order)  # noqa: S311 - not a secret
    order.sort(key=lambda node: -request.risk[node] if request.round_index == 0 else 0)
    pairs = round_robin_pairs(order, request.round_index)
    return None if any(other in request.met[one] for one, other in pairs) else pairs


def _worth(request: RoundRequest, one: int, other: int) -> float:
    """Return how much a test of `one` with `other` would show, or a bye of one of them."""
    if _BYE in (one, other):
        node = max(one, other)
        return -20.0 * request.byes[node] - (node in request.undecided) * 60.0
    worth = 0.0 if other in request.met[one] else 100.0
    doubtful = (one in request.undecided) + (other in request.undecided)
    trusted = (one in request.trusted) + (other in request.trusted)
    if doubtful == 1 and trusted == 1:
        worth += 30.0 + max(request.risk[one], request.risk[other])
    elif doubtful == 1:
        worth += 5.0
    elif doubtful == 2:
        worth -= 10.0
    if request.leaf[one] >= 0 and request.leaf[other] >= 0:
        # tests inside the leaf come first, tests across leaves afterwards
        inside = request.leaf[one] == request.leaf[other]
        known = (one in request.tested_in_leaf) + (other in request.tested_in_leaf)
        worth += 3.0 * (2 - known) if inside else 3.0 * known
    return worth


def _best_round(request: RoundRequest, order: Sequence[int]) -> list[Pair]:
    """Return the most valuable of all perfect matchings of a few nodes."""
    if not order:
        return []
    best: list[Pair] = []
    best_worth = float("-inf")
    first, rest = order[0], order[1:]
    for partner in rest:
        others = _best_round(request, [node for node in rest if node != partner])
        pairs = [(first, partner), *others]
        worth = sum(_worth(request, *pair) for pair in pairs)
        if worth > best_worth:
            best, best_worth = pairs, worth
    return best


def _greedy_round(request: RoundRequest, order: list[int], rng: random.Random) -> list[Pair]:
    """Return a good matching of many nodes: suspects with trusted nodes, then the rest."""
    free = dict.fromkeys(order)
    pairs: list[Pair] = []

    def add(chosen: Iterable[Pair]) -> None:
        for pair in chosen:
            pairs.append(pair)
            for node in pair:
                del free[node]

    add(_with_witnesses(request, order))
    by_leaf: dict[int, list[int]] = {}
    for node in free:
        if request.leaf[node] >= 0:
            by_leaf.setdefault(request.leaf[node], []).append(node)
    if request.round_index == 0:
        for members in by_leaf.values():
            add(zip(members[::2], members[1::2], strict=False))
    elif by_leaf:
        add(_across_leaves(request, by_leaf))
    rest = list(free)
    rng.shuffle(rest)
    stuck: list[int] = []
    while rest:
        node = rest.pop()
        for place in range(len(rest) - 1, -1, -1):
            if rest[place] not in request.met[node]:
                pairs.append((node, rest.pop(place)))
                break
        else:
            stuck.append(node)
    pairs.extend(zip(stuck[::2], stuck[1::2], strict=False))
    return _without_repeats(request, pairs)


def _with_witnesses(request: RoundRequest, order: Sequence[int]) -> list[Pair]:
    """Return the suspects with trusted nodes that they have not met, as far as these suffice."""
    suspects = [node for node in order if node in request.undecided]
    pool = [node for node in order if node in request.trusted and node not in request.undecided]
    by_leaf: dict[int, list[int]] = {}
    for node in pool:
        by_leaf.setdefault(request.leaf[node], []).append(node)
    taken: set[int] = set()

    def first_unmet(node: int, candidates: list[int]) -> int | None:
        while candidates and candidates[-1] in taken:
            candidates.pop()
        for candidate in reversed(candidates):
            if candidate not in taken and candidate not in request.met[node]:
                return candidate
        return None

    pairs: list[Pair] = []
    for suspect in sorted(suspects, key=lambda node: -request.risk[node]):
        home = request.leaf[suspect]
        partner = None
        if home >= 0 and (suspect not in request.tested_in_leaf or home in request.suspect_leaves):
            partner = first_unmet(suspect, by_leaf.get(home, []))
        if partner is None:
            partner = first_unmet(suspect, pool)
        if partner is not None:
            taken.add(partner)
            pairs.append((suspect, partner))
    return pairs


def _across_leaves(request: RoundRequest, by_leaf: dict[int, list[int]]) -> list[Pair]:
    """Return pairs across leaves that spread over as many pairs of leaves as possible.

    The leaves play a round robin; a turn takes one node of either leaf. The turns continue from
    round to round, so that a round with m nodes per leaf covers m pairs of leaves.
    """
    leaves = sorted(by_leaf)
    largest = max(len(members) for members in by_leaf.values())
    pairs: list[Pair] = []
    start = (request.round_index - 1) * largest
    for turn in range(start, start + max(len(leaves), largest)):
        for one, other in round_robin_pairs(leaves, turn):
            here, there = by_leaf[one], by_leaf[other]
            if here and there and there[-1] not in request.met[here[-1]]:
                pairs.append((here.pop(), there.pop()))
    return pairs


def _without_repeats(request: RoundRequest, pairs: list[Pair]) -> list[Pair]:
    """Exchange partners between a repeated pair and another one if then neither repeats."""
    for place, (one, other) in enumerate(pairs):
        if other not in request.met[one]:
            continue
        for elsewhere, (left, right) in enumerate(pairs):
            if elsewhere == place:
                continue
            swaps = (((one, left), (other, right)), ((one, right), (other, left)))
            fitting = [swap for swap in swaps if all(b not in request.met[a] for a, b in swap)]
            if fitting:
                pairs[place], pairs[elsewhere] = fitting[0]
                break
    return pairs
