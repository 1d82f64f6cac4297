# SPDX-License-Identifier: Apache-2.0
"""Max-plus belief propagation: from "the slowest of these" to "which of these".

A test involves a few sources (two nodes; with a topology also leaf uplinks and the path between
them) and observes only the worst of them. Every source has a state on a common grid, 0 being
well. Because a test depends on the maximum alone, a message costs one pass over the grid:

    m(a) = L(a) F(a) + sum over b > a of L(b) f(b)

with L the likelihood of the observation given the maximum, F and f the distribution of the
maximum of the other sources. A slow test that a slower partner explains thus says nothing.

The grid is an early axis, so that the long one, tests, is worked through in one piece. A leading
batch axis lets a small run try several noise levels at once and weigh them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.floating[Any]]  # single precision where there are many of them
Ints = npt.NDArray[np.int64]

NONE = -1  # pads the sources of a test that has fewer than others
_SETTLED = 0.01  # messages that change by less, as logarithms, change nothing


@dataclass(frozen=True)
class Graph:
    """The sources of the tests: `sources` is (tests, up to K), padded with NONE."""

    sources: Ints
    variables: int
    order: Ints  # positions in the flattened sources, grouped by variable, without padding
    starts: Ints  # where the group of a present variable begins in `order`
    present: Ints  # the variables that occur at all
    ordered: bool  # whether `order` is that of the sources already

    @staticmethod
    def of(sources: Ints, variables: int) -> Graph:
        """Index the tests by source."""
        flat = sources.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int64)
        order = order[np.searchsorted(flat[order], 0) :]
        present, starts = np.unique(flat[order], return_index=True)
        ordered = np.array_equal(order, np.arange(len(flat)))
        return Graph(sources, variables, order, starts.astype(np.int64), present, ordered)


@dataclass(frozen=True)
class Beliefs:
    """The beliefs after propagation, all with a leading batch axis.

    `states` is (grid, variables); `others` (tests, K) is the probability that all sources of a
    test except the k-th are well; `well` (tests) that all of them are; `log_evidence` is
    Bethe's estimate of how well the model explains the data.
    """

    states: Floats
    others: Floats
    well: Floats
    log_evidence: Floats
    messages: Numbers


def propagate(
    graph: Graph,
    log_likelihood: Numbers,
    log_prior: Floats,
    *,
    sweeps: int,
    messages: Numbers | None = None,
    damping: float = 0.3,
    tolerated: int = 0,
) -> Beliefs:
    """Pass messages up to `sweeps` times along every test and return the beliefs.

    `log_likelihood` is (batch, grid, tests) and decides the precision, `log_prior` (batch, grid,
    variables). `messages` of an earlier call with the same graph make a warm start. States up to
    `tolerated` count as well in `others`.
    """
    top = log_likelihood.max(axis=1, keepdims=True)
    if graph.sources.shape[1] == 1:
        return _of_single_sources(graph, log_likelihood - top, log_prior, top)
    likelihood = np.exp(log_likelihood - top)
    if messages is None:
        messages = np.zeros((*likelihood.shape, graph.sources.shape[1]), dtype=likelihood.dtype)
    for left in reversed(range(sweeps)):
        before, messages = messages, _sweep(graph, likelihood, messages, log_prior, damping)
        if left and float(np.abs(messages - before).max(initial=0)) < _SETTLED:
            break
    total = _collect(graph, messages, log_prior)
    incoming = _incoming(graph, messages, total)
    others = _others(incoming)
    everyone = others[:, :, :, 0] * _cumulative(incoming[:, :, :, 0])
    joint = np.maximum(likelihood * _density(everyone), _tiny(likelihood))
    raw = _outgoing(likelihood, others)
    return Beliefs(
        states=_normalized(total),
        others=others[:, tolerated].astype(np.float64),
        well=(joint[:, 0] / joint.sum(axis=1)).astype(np.float64),
        log_evidence=_log_evidence(graph, raw, joint, log_prior) + top.sum(axis=(1, 2)),
        messages=messages,
    )


def _of_single_sources(
    graph: Graph, log_likelihood: Numbers, log_prior: Floats, top: Numbers
) -> Beliefs:
    """Return the beliefs if every test has a single source: Bayes' rule, and no messages."""
    messages = np.maximum(log_likelihood, np.log(_tiny(log_likelihood)), out=log_likelihood)
    messages = messages[:, :, :, None]
    total = _collect(graph, messages, log_prior)
    states = _normalized(total)
    return Beliefs(
        states=states,
        others=np.ones((len(states), *graph.sources.shape)),
        well=states[:, 0, graph.sources[:, 0]],
        log_evidence=_log_sum(total).sum(axis=1) + top.sum(axis=(1, 2)),
        messages=messages,
    )


def _normalized(logarithms: Floats) -> Floats:
    """Return the distributions over the grid, which is axis 1."""
    states: Floats = np.exp(logarithms - logarithms.max(axis=1, keepdims=True))
    states /= states.sum(axis=1, keepdims=True)
    return states


def _log_sum(logarithms: Floats) -> Floats:
    """Return the logarithm of the sum over the grid, which is axis 1."""
    peak = logarithms.max(axis=1)
    total: Floats = peak + np.log(np.exp(logarithms - peak[:, None]).sum(axis=1))
    return total


def _sweep(
    graph: Graph, likelihood: Numbers, messages: Numbers, log_prior: Floats, damping: float
) -> Numbers:
    """Return every message anew from all others."""
    incoming = _incoming(graph, messages, _collect(graph, messages, log_prior))
    fresh = _log(_outgoing(likelihood, _others(incoming)))
    fresh -= fresh.max(axis=1, keepdims=True)
    return damping * messages + (1 - damping) * fresh if damping else fresh


def _tiny(values: Numbers) -> float:
    return float(np.finfo(values.dtype).tiny)


def _log(values: Numbers) -> Numbers:
    logarithms: Numbers = np.log(np.maximum(values, _tiny(values)))
    return logarithms


def _collect(graph: Graph, messages: Numbers, log_prior: Floats) -> Floats:
    """Return prior times all messages per variable, in logarithms."""
    batch, grid, tests, width = messages.shape
    total = log_prior.copy()
    if len(graph.order):
        flat = messages.reshape(batch, grid, tests * width)
        if not graph.ordered:
            flat = flat[:, :, graph.order]
        total[:, :, graph.present] += np.add.reduceat(flat, graph.starts, axis=2)
    return total


def _incoming(graph: Graph, messages: Numbers, total: Floats) -> Numbers:
    """Return the beliefs about sources without the test, shaped like messages."""
    outgoing = total.astype(messages.dtype, copy=False)[:, :, graph.sources] - messages
    outgoing -= outgoing.max(axis=1, keepdims=True)
    belief: Numbers = np.exp(outgoing, out=outgoing)
    belief /= belief.sum(axis=1, keepdims=True)
    padding = graph.sources == NONE
    if padding.any():
        belief[:, :, padding] = 0.0
        belief[:, 0, padding] = 1.0
    return belief


def _others(incoming: Numbers) -> Numbers:
    """Return per source the distribution of the worst of the others."""
    width = incoming.shape[3]
    cumulative = _cumulative(incoming)
    if width == 2:
        return cumulative[:, :, :, ::-1]
    others = np.ones_like(cumulative)
    for source in range(width):
        for other in range(width):
            if other != source:
                others[:, :, :, source] *= cumulative[:, :, :, other]
    return others


def _cumulative(density: Numbers) -> Numbers:
    """Return the sums up the grid, which is axis 1.

    As `np.cumsum` does, which takes each test by itself: row by row is 20 times as fast.
    """
    sums = density.copy()
    for state in range(1, sums.shape[1]):
        sums[:, state] += sums[:, state - 1]
    return sums


def _density(cumulative: Numbers) -> Numbers:
    """Return the density of a distribution over the grid, which is axis 1."""
    density = cumulative.copy()
    density[:, 1:] -= cumulative[:, :-1]
    return density


def _outgoing(likelihood: Numbers, others: Numbers) -> Numbers:
    """Return the messages to the sources."""
    weighted = likelihood[:, :, :, None] * _density(others)
    # what the observation says if another source is worse than this one
    above = _cumulative(weighted[:, ::-1])[:, ::-1]
    above -= weighted
    message: Numbers = likelihood[:, :, :, None] * others
    message += np.maximum(above, 0.0, out=above)
    return message


def _log_evidence(graph: Graph, raw: Numbers, joint: Numbers, log_prior: Floats) -> Floats:
    """Return Bethe's logarithm of the evidence, up to the scale of the likelihoods."""
    per_variable = _log_sum(_collect(graph, _log(raw), log_prior))
    sources_of_test = (graph.sources != NONE).sum(axis=1)
    per_test = np.log(joint.sum(axis=1)) * (sources_of_test - 1)
    evidence: Floats = per_variable.sum(axis=1) - per_test.sum(axis=1)
    return evidence
